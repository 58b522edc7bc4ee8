"""Commands that start ranks themselves: in each task of a job, they would start all ranks again.

`submit --nodes 2 --gpus-per-node 2 -- torchrun --nproc-per-node 2 train.py` would run four separate trainings of two
ranks each, and look successful. `srun` in a task waits for ever for CPUs that the task has.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from cluster_ddp.agent.python_command import ASSIGNMENT, SHELLS, is_interpreter
from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.spec import JobSpec

CODE = "nested"
"""The code that accepts such a command: --accept nested."""

_RUNS_ANOTHER = (
    "env time nohup nice ionice setsid stdbuf timeout numactl taskset exec command if then else while do ! {"
)
_MANAGERS = ("uv", "poetry", "pipenv", "pixi", "hatch", "conda", "mamba", "micromamba")
# A program, with its verb, or a module behind `python -m` -> what it does with the words behind it.
_PROGRAMS: Mapping[str, str] = {
    **dict.fromkeys(_RUNS_ANOTHER.split(), "runs another"),
    **dict.fromkeys((f"{name} run" for name in _MANAGERS), "runs another"),
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "starts ranks as torchrun"),
    **dict.fromkeys(("accelerate launch", "accelerate.commands.launch"), "starts ranks as torchrun"),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "starts ranks"),
    **dict.fromkeys(("horovodrun", "mpirun", "mpiexec"), "starts ranks"),
    "srun": "asks for tasks",
    **dict.fromkeys(("sbatch", "salloc"), "asks for a job"),
}
# A launcher in the text of a command: with the Python that runs it, its options, and the Python that it runs.
_PYTHON = r"(?<![^\s'])[^\s=']*python[\d.]*\s[^;&|]*?"
_SCRIPT = r"(?='[^']+\.py'|\S+\.py\b|(?<!\S)-m\s)"
_LAUNCHER = rf"(?:{_PYTHON}|-m\s)?[^\s']*{{}}\s(?P<options>.*?)(?P<python>{_PYTHON})?{_SCRIPT}"
_NUMBER_OF_RANKS = r"(?<!\S)(?:--nproc[-_]per[-_]node|--num[-_]processes|--num_gpus|--ntasks|-np?|--np)[= ](\d+)(?!\S)"


def check(spec: JobSpec) -> None:
    """Refuse a command that starts ranks itself. One task may start one a GPU, but not by Slurm's commands.

    Raises:
        SpecError: the command does. The hint has the command without its launcher, if that names a script.
    """
    nested = find(spec.command, tasks=spec.nodes * spec.ranks_per_node, gpus=spec.gpus_per_node)
    if nested is None:
        return
    asked = f"Submitting {shlex.join(spec.command)}:"
    if nested.is_a_job:
        raise SpecError(asked, nested.found, f"run it without cluster-ddp: {nested.instead}")
    size = f"--gpus-per-node {nested.ranks} " if spec.world_size == 1 and nested.ranks > spec.gpus_per_node else ""
    raise SpecError(asked, nested.found, f"{size}{nested.instead}; to submit it anyway: --accept {CODE}")


class Nested(NamedTuple):
    """A command that starts ranks itself."""

    found: str
    """What it does, as a sentence."""
    instead: str
    """The options and the command that are meant."""
    ranks: int = 0
    """How many ranks it is told to start; 0 if that is not said."""
    is_a_job: bool = False
    """Whether it asks Slurm for a job."""


def find(command: Sequence[str], *, tasks: int, gpus: int | None) -> Nested | None:
    """Return what is wrong with a command that so many tasks run, if it starts ranks itself. `gpus` are a node's."""
    launcher = _launcher(command)
    if launcher is None:
        return None
    name, does = launcher.split()[0], _PROGRAMS[launcher]
    ranks, instead = _without(launcher, command)
    if does == "asks for a job":
        found = f"{name} asks for a job of its own, so this job would only submit another."
        return Nested(found, shlex.join(command), is_a_job=True)
    if does == "asks for tasks":
        found = f"{name} asks Slurm for tasks. The job starts this command in each of its tasks already."
    elif tasks > 1:
        found = f"{name} starts ranks itself. Each of the {tasks} ranks of this job would start them again."
    elif gpus is not None and ranks > gpus:
        found = f"{name} starts {ranks} ranks, and this job has {counted(gpus, 'GPU')}."
    else:
        return None
    option = "--launcher torchrun " if does == "starts ranks as torchrun" else ""
    return Nested(found, f"{option}-- {instead}", ranks)


def _launcher(words: Sequence[str]) -> str | None:
    """The launcher that a command begins with, behind programs such as `env`, `uv run` and Python; None without one."""
    before, is_python = "", False
    for at, word in enumerate(words):
        name = PurePath(word.removeprefix("-m")).name
        key = name if name in _PROGRAMS else " ".join([name, *words[at + 1 : at + 2]])
        if name in SHELLS:
            return _in_text(words[at + 1 :])
        if _PROGRAMS.get(key, "runs another") != "runs another":
            return key
        is_value = before in ("-W", "-X") if is_python else before.startswith("-") or word[:1].isdigit()  # timeout 10
        is_python = is_python or is_interpreter(name)
        is_known = key in _PROGRAMS or is_interpreter(name) or f"{before} {word}" in _PROGRAMS
        if not (
            is_known or word.startswith("-") or ASSIGNMENT.fullmatch(word) or (is_value and not shutil.which(word))
        ):
            return None  # another program, or a script
        before = word
    return None


def _in_text(words: Sequence[str]) -> str | None:
    """The launcher in the text that a shell with these arguments runs: `-c TEXT`."""
    option = next((at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    text = "".join(words[option + 1 : option + 2]).replace("\\\n", " ").replace("\n", "\n;\n")
    tokens = shlex.shlex(text, posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    command: list[str] = []
    try:
        for token in [*tokens, ";"]:
            if not set(token) <= set(";&|()<>"):
                command.append(token)
            elif found := _launcher(command):
                return found
            else:
                command = []
    except ValueError:  # unbalanced quotes: bash will say so
        pass
    return None


def _without(launcher: str, command: Sequence[str]) -> tuple[int, str]:
    """How many ranks a launcher is told to start, 0 if that is not said; and the command that is meant, without it."""
    name, text = launcher.split()[0], shlex.join(command).replace("\\\n", " ")
    match = re.search(_LAUNCHER.format(re.escape(launcher)), text, re.DOTALL)
    options = match["options"].strip() if match else text.partition(name)[2]
    ranks = re.search(_NUMBER_OF_RANKS, options)
    if match is None:
        meant = f"COMMAND (the one behind {name} and its options)"
    else:
        meant = text[: match.start()] + (match["python"] or "python ") + text[match.end() :]
        left_out = [f"{name}'s {options}"] if options else []
        if amp := re.search(r"--mixed[-_]precision[= ](\w+)", options):
            left_out[0] += f'; in the script: Accelerator(mixed_precision="{amp[1]}")'
        if meant.startswith("env -i "):
            meant = meant.replace(" -i", "", 1)
            left_out.insert(0, "env's -i, which would clear RANK and WORLD_SIZE")
        meant += f" (without {', and '.join(left_out)})" if left_out else ""
    return int(ranks[1]) if ranks else 0, meant
