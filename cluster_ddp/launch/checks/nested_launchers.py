"""Commands that start ranks themselves: in each task of a job, they would start all ranks again.

`submit --nodes 2 --gpus-per-node 2 -- torchrun --nproc-per-node 2 train.py` would run four separate trainings of two
ranks each, and look successful. `srun` in a task waits for ever for CPUs that the task has.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import PurePath

from cluster_ddp.errors import SpecError
from cluster_ddp.launch.parse_python_command import program_words
from cluster_ddp.launch.spec import JobSpec

CODE = "nested"
"""The code that accepts such a command: --accept nested."""

# Programs, and modules behind `python -m`, that start ranks on this node. They make sense in a job with a single task.
_START_RANKS = {
    "torchrun": (),
    "torch.distributed.run": (),
    "torch.distributed.launch": (),
    "accelerate": ("launch",),
    "accelerate.commands.launch": (),
    "deepspeed": (),
    "deepspeed.launcher.runner": (),
    "horovodrun": (),
    "mpirun": (),
    "mpiexec": (),
}
_OURS = re.compile(r"--?(n|N|H|rdzv|master|main|machine|local|hostfile|standalone|max)")
"""Options of launchers that have a counterpart in every job here."""
_SLURMS = ("srun", "sbatch", "salloc")
_TORCHS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch")


def check(spec: JobSpec) -> None:
    """Refuse a command that starts ranks itself.

    Args:
        spec: the job. A job with one task may start ranks itself, but not by Slurm's commands.

    Raises:
        SpecError: the command does. The hint has the command without its launcher, if that is known.
    """
    launcher, rest = _launcher(spec.command)
    if launcher in _SLURMS:
        found = f"{launcher} asks Slurm for tasks. The job starts this command in each of its tasks already."
    elif launcher and spec.nodes * spec.ranks_per_node > 1:
        found = (
            f"{launcher} starts ranks itself. This job has {spec.world_size} tasks, and each would start them again."
        )
    else:
        return
    if launcher in ("sbatch", "salloc"):
        hint = f"run it without cluster-ddp: {shlex.join(spec.command)}"
        raise SpecError(f"Submitting {shlex.join(spec.command)}:", found, hint)
    left_out, script = _script(rest, any_program=launcher in _SLURMS)
    option = "--launcher torchrun " if launcher in _TORCHS else ""
    without = f" (without {launcher}'s {shlex.join(left_out)})" if left_out else ""
    hint = f"{option}-- {shlex.join(script)}{without}; to submit it anyway: --accept {CODE}"
    raise SpecError(f"Submitting {shlex.join(spec.command)}:", found, hint)


def _launcher(command: Sequence[str]) -> tuple[str, list[str]]:
    """The launcher that a command begins with, and the words behind it; empty without one."""
    words = program_words(command)
    name = PurePath(words[0]).name if words else ""
    if name.startswith("python") and "-m" in words[1:3]:
        words = words[words.index("-m") + 1 :]
        name = words[0] if words else ""
    verb = _START_RANKS.get(name, ())
    if name not in _SLURMS and (name not in _START_RANKS or tuple(words[1 : 1 + len(verb)]) != verb):
        return "", []
    return name, words[1 + len(verb) :]


def _script(words: list[str], *, any_program: bool) -> tuple[list[str], list[str]]:
    """A launcher's options that the job does not have already; and the script or module, as a command."""
    for at, word in enumerate(words):
        if any_program and shutil.which(word):
            return words[:at], words[at:]
        if word.endswith(".py"):
            return _not_ours(words[:at]), ["python", *words[at:]]
        if word in ("-m", "--module") and at + 1 < len(words):
            return _not_ours(words[:at]), ["python", "-m", *words[at + 1 :]]
    return [], ["python", "SCRIPT.py"]


def _not_ours(words: list[str]) -> list[str]:
    """Options of a launcher, without those that say how many ranks there are and where they meet, and their values."""
    left: list[str] = []
    is_ours = False
    for word in words[:-1] if words[-1:] and words[-1].startswith("python") else words:
        if word.startswith("-"):
            is_ours = bool(_OURS.match(word)) and "=" not in word
            if not _OURS.match(word):
                left.append(word)
        elif is_ours:
            is_ours = False
        else:
            left.append(word)
    return left
