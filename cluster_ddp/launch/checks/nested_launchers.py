"""Commands that start ranks themselves: in each task of a job, they would start all ranks again.

`submit --nodes 2 --gpus-per-node 2 -- torchrun --nproc-per-node 2 train.py` would run four separate trainings of two
ranks each, and look successful. `srun` in a task waits for ever for CPUs that the task has.
"""

from __future__ import annotations

import shlex
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
    option = "--launcher torchrun " if launcher in _TORCHS else ""
    hint = f"{option}-- {shlex.join(_script(rest))}; to submit it anyway: --accept {CODE}"
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


def _script(words: list[str]) -> list[str]:
    """The script or module among a launcher's words, as a command."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return ["python", *words[at:]]
        if word in ("-m", "--module") and at + 1 < len(words):
            return ["python", "-m", *words[at + 1 :]]
    return ["python", "SCRIPT.py"]
