"""The options of a job's ranks, defined once: `submit`, cluster.toml, `launch` and the agents have them from here.

`words` and `parse` carry them in a batch script, and to the agents of the tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any

from cluster_ddp.errors import SpecError
from cluster_ddp.option_form import Form, default_of, flag, option
from cluster_ddp.run.names import TRACKERS

PATH = {"pattern": r"[^\x00-\x1f\x7f]+", "legal": "a path without line breaks", "metavar": "PATH"}
"""The form of a path."""
SIZE = {"pattern": r"\d+[KMGT]?", "legal": "a size such as 32G (per node; units K, M, G, T)"}
"""The form of a size of memory, as sbatch takes it."""
_AN_IMAGE = {"container": "image.sif"}
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def passed_on(program: str, example: str) -> dict[str, Any]:
    """Return the form of options that are passed on to a program."""
    legal = f"options such as {example}"
    pattern = r"--[a-z][a-z-]*(=[^\x00-\x20\x7f\"'`$\\#]+)?"
    return {"pattern": pattern, "legal": legal, "metavar": "OPTION", "hint": f"for example {program}={example}"}


@dataclass(frozen=True)
class RankOptions:
    """How the ranks are started, and what follows their end: options of a submission and of `launch`."""

    command: tuple[str, ...] = ()
    """Command of every task, one item per word; each is quoted for the shell. In an array, "{array_task_id}" becomes
    the task's number, and "{key}" the task's value of this key of the grid."""
    gpus_per_task: int = option(1, least=1, hint="for one GPU a rank: --gpus-per-task 1")
    """Number of GPUs that each rank drives, for a model over several: `distributed(gpus_per_task=…)`."""
    launcher: str = option("srun", one_of=("srun", "fork"), hint="leave it out, or --launcher srun")
    """srun: one task per rank. fork: one task per node; it imports torch once and forks the ranks; for Python scripts
    and modules."""
    chain: bool = option(False, is_for_agent=True)
    """Where requeues are forbidden: continue in a next job, with the same run directory. It counts as a requeue. The
    jobs are an array of `max_requeues` + 1 tasks, which Slurm runs one after the other."""
    max_requeues: int = 20
    """Requeue a job that was stopped in time (exit status 75), unless it has restarted this often already."""
    restarts: int = option(0, hint="for three: --restarts 3")
    """How often to start the ranks again after a failure, from the newest checkpoint: in the job's allocation, without
    a node that is lost or at fault, else by a requeue. Four failures without a new checkpoint end the job."""
    spare_nodes: int = option(0, needs={"restarts": 3})
    """On Slurm: number of nodes beside those that train. They wait idle, until another node is lost or at fault. It
    needs `restarts`."""
    hang_restart_s: int = option(0, needs={"restarts": 3}, hint="for a minute: --hang-restart-s 60")
    """Seconds after the warning of a hang (--hang-warning-s) until all ranks start again without a node that does not
    answer. It needs `restarts`. 0: not before the collective timeout."""
    max_mem: str = option("0", **SIZE, needs={"restarts": 3}, hint="for 128 GiB: --max-mem 128G")
    """On Slurm, with --mem: if a process is killed for memory, requeue the job with 1.5 times as much, up to this.
    That counts as none of the `restarts`, which it needs. 0: the memory stays."""
    restart_args: str = option(
        "",
        pattern=r"[^\x00-\x1f\x7f]*",
        legal="words in one line",
        hint="for example --restart-args '--resume last.pth'",
    )
    """Words to add to the command from its second start on, quoted as for a shell, such as "--resume last.pth"."""
    doctor: bool = False
    """Examine the nodes before the ranks start (cluster-ddp doctor --quick); a problem ends the job with a verdict."""
    track: tuple[str, ...] = option((), one_of=TRACKERS)
    """Trackers that get the run's metrics: tensorboard, wandb, mlflow. They write files in the run directory."""
    share: bool = False
    """Let your group read the run directory. By default, only you can."""
    container: str | None = option(None, **{**PATH, "metavar": "IMAGE"})
    """Container image for Apptainer or Singularity: a .sif file or a URI such as docker://…"""
    container_image: str | None = option(
        None,
        metavar="IMAGE",
        pattern=r"[^\x00-\x20\x7f]+",
        legal="an image as Enroot names it, such as nvcr.io#nvidia/pytorch:25.10-py3",
    )
    """Container image for Pyxis and Enroot."""
    container_binds: tuple[str, ...] = option(
        (),
        metavar="PATH",
        pattern=r"[^\x00-\x1f\x7f,]+",
        legal="paths such as /data or /scratch/me:/data, without commas",
        needs={**_AN_IMAGE, "container_image": "image"},
    )
    """More folders for the container, as PATH or SOURCE:DESTINATION. It always has the working and run directories."""
    container_overlays: tuple[str, ...] = option((), **PATH, needs=_AN_IMAGE)
    """Overlays of an Apptainer container, mounted read-only."""
    srun_options: tuple[str, ...] = option((), **passed_on("--srun-options", "--cpu-bind=verbose"))
    """More options for srun, which starts the ranks, such as --cpu-bind=verbose."""


@dataclass(frozen=True)
class AgentOptions(RankOptions):
    """What to start, and what to do when it ends."""

    ranks: int | None = None
    """Start so many ranks on this machine, without Slurm."""
    ranks_per_node: int | None = None
    """Number of ranks on each node (default: the job's tasks, or one for each GPU)."""
    cpus_per_task: int | None = None
    """With --ranks: number of CPUs of each rank."""
    time_limit_s: int | None = None
    """With --ranks: time limit of each start, in seconds. Of a packed task: of all in one job."""
    nodes: str | None = option(None, metavar="MIN-MAX")
    """The job's range of nodes (#SBATCH --nodes=2-8): a restart continues with those that are left."""
    run_dir: str | None = option(None, **PATH)
    """Run directory, for logs, metrics and checkpoints. %j in it stands for the job's id, 12 or 12_3; %a for the
    number of the array's task, 3."""
    cleanup: str | None = option(None, metavar="LINES")
    """Lines for bash, once the ranks have ended and before a requeue; $status is theirs: 'rm -rf "$SCRATCH"'."""
    code: str | None = option(None, is_for_agent=True)
    """Where the ranks run; None for here."""
    venv: str | None = option(None, is_for_agent=True)
    """The virtual environment that `stage_env` holds."""
    stage_env: str | None = option(None, is_for_agent=True)
    """An archive of it, which each node unpacks."""
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict, metadata={"form": Form(is_for_agent=True)})
    """Values of each placeholder of the command in an array; the last one varies fastest."""
    function: bool = option(False, is_for_agent=True)
    """Whether the command is submitit's runner, which calls a pickled function."""
    ignore_warnings: bool = option(False, is_for_agent=True)
    """Of a task: whether its command may be sent a warning (USR1, USR2) before it has a handler."""
    pack: int | None = option(None, is_for_agent=True)
    """Of a job that holds tasks of an array: how many run at a time. None: the job is one task."""
    jobs: int = option(1, is_for_agent=True)
    """How many such jobs the array has."""
    array: str = option("", is_for_agent=True)
    """The numbers of all tasks, as sbatch takes them."""
    signal: str = option("", is_for_agent=True)
    """Of such a task: the signal before its time limit, such as USR1@120."""


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at its first "--" into the options and the command."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def words(options: AgentOptions) -> list[str]:
    """Return options as words of a command line, without those that have their default; the inverse of `parse`.

    Each option is one word, with its value if it has one: so the value may begin with a dash.
    """
    found: list[str] = []
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name == "command" or value == default_of(one):
            continue
        if value is True:
            found.append(flag(one.name))
        elif isinstance(value, Mapping):
            found.append(f"{flag(one.name)}={json.dumps(dict(value))}")
        else:
            found += [f"{flag(one.name)}={part}" for part in (value if isinstance(value, tuple) else (value,))]
    return [*found, "--", *options.command]


def parse(line: Sequence[str]) -> AgentOptions:
    """Return the options of a command line of the agent, which a script or another agent has written with `words`.

    Raises:
        SpecError: it has another form.
    """
    own, command = split(line)
    known = {flag(one.name): one for one in fields(AgentOptions) if one.name != "command"}
    values: dict[str, Any] = {}
    for word in own:
        name, _, text = word.partition("=")
        try:
            one = known[name]
            value = _value(str(one.type), text)
        except (KeyError, ValueError) as error:
            found = f"{word!r} is no option with its value in one word."
            raise SpecError("Reading the options of a job's agent:", found, "such as --restarts=3") from error
        values[one.name] = (*values.get(one.name, ()), *value) if isinstance(value, tuple) else value
    if not command:
        raise SpecError("Reading the options of a job's agent:", "there is no command.", "give it behind two dashes")
    return AgentOptions(**values, command=tuple(command))


def _value(kind: str, text: str) -> Any:
    """Return what a text means for a field with this annotation. Raises ValueError if it means nothing."""
    if kind.startswith("tuple"):
        return (text,)
    if kind == "bool":
        return True
    if kind.startswith("int"):
        return int(text)
    return json.loads(text) if kind.startswith("Mapping") else text


def mebibytes(mem: str) -> int:
    """Return a size as --mem takes it, such as 32G or 500 (MiB), in MiB, rounded up."""
    digits = mem.rstrip("KMGT")
    return ceil(int(digits) * _MIB[mem[len(digits) :] or "M"])


def node_range(text: str) -> tuple[int, int]:
    """Return both ends of a number of nodes, or of a range: 2-8.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"is a number of nodes, or a range such as 2-8, not {text!r}")
    return least, most
