"""A job as data, checked before anything is rendered or submitted.

One task drives one GPU, so nothing here asks for tasks: the script's --ntasks-per-node is its GPU count by design.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from cluster_ddp.errors import SpecError

ARRAY_TASK_PLACEHOLDER = "{array_task_id}"

# What each text field may hold: sbatch's own syntax without anything a shell or an #SBATCH line could take for more.
# (sbatch(1); in none of them are blanks, quotes, '$', '`', '\\', '#' or line breaks.)
_PATTERNS: dict[str, tuple[str, str]] = {
    "name": (r"[\w.+@=-]{1,128}", "letters, digits and . _ + - @ ="),
    "gpu_type": (r"[\w.-]+", "a type that sinfo -o %G shows, such as a100"),
    "mem": (r"\d+[KMGT]?", "a size such as 32G (per node)"),
    "partition": (r"[\w.+@-]+(,[\w.+@-]+)*", "names that sinfo shows, separated by commas"),
    "account": (r"[\w.+@/-]+", "a name that sacctmgr show associations shows"),
    "qos": (r"[\w.+@-]+", "a name that sacctmgr show qos shows"),
    "constraint": (r"[\w.+@=:&|!*,()\[\]-]+", "features that sinfo -o %f shows, such as a100&nvlink"),
    "array": (
        r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?",
        "task numbers such as 0-7, 1,3,5 or 0-99%4",
    ),
    "signal": (r"([BR]{1,2}:)?[A-Z0-9]+(@\d+)?", "such as USR1@120: the signal, seconds before the end"),
    "output": (r"[^\x00-\x1f\x7f\"'`$\\#]+", "a path without quotes, $, \\, # and line breaks"),
    "venv": (r"[^\x00-\x1f\x7f]+", "a path without line breaks"),
    "conda_env": (r"[^\x00-\x1f\x7f]+", "a name or path without line breaks"),
    "description": (r"[^\x00-\x1f\x7f]*", "one line"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What to run on what. None leaves a setting to the cluster's default.

    Raises:
        SpecError: a field that sbatch or a shell would misread; it names the field.
    """

    name: str
    """Of the job, as squeue shows it."""
    command: tuple[str, ...]
    """What every task runs, an argument each, quoted for the shell; "{array_task_id}" in it becomes the array task's.
    Arguments that follow the script on sbatch's command line are appended."""
    description: str = ""
    """One line for the script's header."""
    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 1
    """GPUs, and so tasks, on each node."""
    gpu_type: str | None = None
    """Kind of GPU, as the cluster's gres names it."""
    cpus_per_task: int | None = None
    """CPUs for each GPU's task."""
    mem: str | None = None
    """Memory per node, such as 32G."""
    time: str | None = None
    """Limit, in any of Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Kept as D-HH:MM:SS."""
    partition: str | None = None
    """Partition, or several to choose from, separated by commas."""
    account: str | None = None
    """Who pays."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have."""
    array: str | None = None
    """Task numbers of a job array, such as 0-7 or 0-99%4 (four at a time)."""
    output: str | None = None
    """File for the job's output, in sbatch's pattern; its folder must exist. Default: %x-%j.out, in arrays
    %x-%A_%a.out."""
    signal: str | None = None
    """Warning before the time limit, such as USR1@120."""
    requeue: bool | None = None
    """Whether Slurm may start the job again after preemption or the loss of a node."""
    modules: tuple[str, ...] = ()
    """Environment modules to load first."""
    venv: str | None = None
    """Virtual environment to activate."""
    conda_env: str | None = None
    """Conda environment to activate."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the ranks start. They are run as they are: never put text from others here."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_task"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise _error(name, value, "a whole number of 1 or more")
        for name in ("command", "modules", "setup"):
            if isinstance(getattr(self, name), str):
                raise _error(name, getattr(self, name), "a tuple of texts, not one text")
        for field in fields(self):
            if field.name in _PATTERNS and getattr(self, field.name) is not None:
                self._check_text(field.name)
        if self.time is not None:
            object.__setattr__(self, "time", normalized_time(self.time))
        if not self.command or any("\0" in argument for argument in self.command):
            raise _error("command", self.command, "a program and its arguments, without NUL bytes")
        if any(not re.fullmatch(r"[\w.+/-]+", module) for module in self.modules):
            raise _error("modules", self.modules, "names that module avail shows, such as cuda/12.8")
        if self.array is None and any(ARRAY_TASK_PLACEHOLDER in word for word in self.command):
            raise _error("command", self.command, f"without {ARRAY_TASK_PLACEHOLDER} unless array is set")
        if self.venv is not None and self.conda_env is not None:
            raise _error("conda_env", self.conda_env, "left out where venv is given")

    def _check_text(self, name: str) -> None:
        pattern, legal = _PATTERNS[name]
        value = getattr(self, name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise _error(name, value, legal)
        if name == "name" and value.startswith("-"):
            raise _error(name, value, "without a '-' in front")


def normalized_time(text: str) -> str:
    """A time limit in the form D-HH:MM:SS, or UNLIMITED.

    Args:
        text: one of sbatch(1)'s forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED.

    Raises:
        SpecError: none of them, or nothing.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return "UNLIMITED"
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise _error("time", text, "one of 30 (minutes), 30:00, 1:30:00, 2-12 (days-hours), 2-12:30:00")
    days, *rest = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        hours, minutes, seconds = rest[0], rest[1] or 0, rest[2] or 0
    elif rest[2] is not None:
        hours, minutes, seconds = rest[0], rest[1] or 0, rest[2]
    else:
        hours, minutes, seconds = 0, rest[0] or 0, rest[1] or 0
    total_s = ((days or 0) * 24 + (hours or 0)) * 3600 + (minutes or 0) * 60 + (seconds or 0)
    if total_s == 0:
        raise _error("time", text, "longer than nothing (0 would be no limit at all)")
    total_min, seconds = divmod(total_s, 60)
    total_h, minutes = divmod(total_min, 60)
    return f"{total_h // 24}-{total_h % 24:02}:{minutes:02}:{seconds:02}"


def _error(name: str, value: object, legal: str) -> SpecError:
    return SpecError(f"A job with {name}={value!r}:", f"{name} must be {legal}.", f"change {name}")
