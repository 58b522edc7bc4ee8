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

from cluster_ddp.agent.python_command import ASSIGNMENT, SHELLS, is_python, python_target
from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.spec import JobSpec

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
_NUMBER_OF_RANKS = re.compile(r"(?:--nproc[-_]per[-_]node|--num[-_]processes|--num_gpus|--ntasks|-np?|--np)(?:=(.*))?")
# Programs that start another one, and the words behind their names with which they do.
_WRAPPERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("env", "time", "nohup", "nice", "ionice", "setsid", "stdbuf", "timeout", "numactl", "taskset"), ()
    ),
    **dict.fromkeys(("uv", "poetry", "pipenv", "pixi", "hatch", "conda", "mamba", "micromamba"), ("run",)),
}
_BEFORE_COMMANDS = ("exec", "command", "time", "if", "then", "else", "while", "do", "!", "{")
_OURS = re.compile(r"--?(n|N|H|rdzv|master|main|machine|local|hostfile|standalone|max)")
"""Options of launchers that have a counterpart in every job here."""
_SLURMS = ("srun", "sbatch", "salloc")
_TORCHS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch")


def check(spec: JobSpec) -> None:
    """Refuse a command of a job that starts ranks itself.

    Args:
        spec: the job. A job with one task may start as many ranks as it has GPUs, but not by Slurm's commands.

    Raises:
        SpecError: the command does. The hint has the command without its launcher, if that is known.
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
    """Return what is wrong with a command that starts ranks itself; None for another one.

    Args:
        command: what each task runs.
        tasks: how many tasks run it.
        gpus: GPUs of a node; None if unknown.
    """
    launch = _launch(list(command))
    if launch is None:
        return None
    launcher, ranks = launch.name, _ranks(launch.rest)
    if launcher in ("sbatch", "salloc"):
        found = f"{launcher} asks for a job of its own, so this job would only submit another."
        return Nested(found, shlex.join(command), is_a_job=True)
    if launcher == "srun":
        found = f"{launcher} asks Slurm for tasks. The job starts this command in each of its tasks already."
    elif tasks > 1:
        found = f"{launcher} starts ranks itself. Each of the {tasks} ranks of this job would start them again."
    elif gpus is not None and ranks > gpus:
        found = f"{launcher} starts {ranks} ranks, and this job has {counted(gpus, 'GPU')}."
    else:
        return None
    option = "--launcher torchrun " if launcher in _TORCHS else ""
    return Nested(found, f"{option}-- {_instead(launch)}", ranks)


def _instead(launch: _Launch) -> str:
    """The command without its launcher, and what it lacks then."""
    left_out, script = _script(launch.rest, any_program=launch.name in _SLURMS)
    without = f"{launch.name}'s {shlex.join(left_out)}" if left_out else ""
    if amp := re.search(r"--mixed[-_]precision[= ](\w+)", without):
        without += f'; in the script: Accelerator(mixed_precision="{amp[1]}")'
    if launch.before[:2] == ("env", "-i"):
        launch = launch._replace(before=("env", *launch.before[2:]))
        without = ", and ".join(filter(None, ["env's -i, which would clear RANK and WORLD_SIZE", without]))
    return f"{launch.command(script)} (without {without})" if without else launch.command(script)


class _Launch(NamedTuple):
    """A launcher in a command."""

    name: str
    rest: list[str]
    """The words behind it."""
    before: tuple[str, ...] = ()
    """The words before it, such as `env A=1`."""
    around: tuple[str, str] | None = None
    """If a shell must run it: the text before and behind it there."""

    def command(self, script: list[str]) -> str:
        """The command that runs a script where the launcher was."""
        if self.around is not None:
            script = ["bash", "-c", " ".join(script).join(self.around)]
        return shlex.join([*self.before, *script])


def _launch(words: list[str]) -> _Launch | None:
    """The launcher that a command begins with, behind programs such as `env` and `uv run`; None without one."""
    name = PurePath(words[0]).name if words else ""
    if (verb := _WRAPPERS.get(name)) is not None and words[1 : 1 + len(verb)] == list(verb):
        return _wrapped(words, 1 + len(verb))
    if name in SHELLS:
        return _in_shell(words)
    if is_python(words):
        words = python_target(words).words
        name = PurePath(words[0]).name if words else ""
    starts = _START_RANKS.get(name, ())
    if name not in _SLURMS and (name not in _START_RANKS or words[1 : 1 + len(starts)] != list(starts)):
        return None
    return _Launch(name, words[1 + len(starts) :])


def _wrapped(words: list[str], start: int) -> _Launch | None:
    """The launcher that another program starts: the first word that is no option, and no value of one."""
    for at in range(start, len(words)):
        word = words[at]
        is_value = words[at - 1].startswith("-") or word[:1].isdigit()  # timeout 10, taskset 0x3
        if words[0] == "uv" and word in ("-m", "--module"):
            inner = _launch(["python", *words[at:]])
        elif _is_program(word):
            inner = _launch(words[at:])
        elif is_value or word.startswith("-") or ASSIGNMENT.fullmatch(word):
            continue
        else:
            return None
        return inner and inner._replace(before=(*words[:at], *inner.before))
    return None


def _is_program(word: str) -> bool:
    name = PurePath(word).name
    known = name in _START_RANKS or name in _SLURMS or name in _WRAPPERS or is_python([word])
    return known or (not word.startswith("-") and shutil.which(word) is not None)


def _in_shell(words: list[str]) -> _Launch | None:
    """The launcher in the text of `bash -c TEXT`."""
    at = next((at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    text = "".join(words[at + 1 : at + 2]).replace("\\\n", " ")
    reader = shlex.shlex(text.replace("\n", "\n;\n"), posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for token in reader:
            if set(token) <= set(";&|()<>\n"):
                if set(token) & set("<>") and commands[-1][-1:] in (["1"], ["2"]):  # 2>log
                    commands[-1].pop()
                commands.append([])
            elif not commands[-1] and ASSIGNMENT.fullmatch(token):
                commands[-1] = ["env", token]
            elif commands[-1] or token not in _BEFORE_COMMANDS:
                commands[-1].append(token)
    except ValueError:  # unbalanced quotes: bash will say so
        return None
    commands = [command for command in commands if command]
    found, command = next(((one, words) for words in commands if (one := _launch(words))), (None, []))
    if found is None or (len(commands) == 1 and not set(text) & set("$`*?~")):
        return found
    before, typed, behind = text.partition(" ".join(command[len(found.before) :]))
    return found._replace(before=(), around=(before, behind) if typed else ("… ", ""))


def _ranks(words: list[str]) -> int:
    """How many ranks a launcher is told to start; 0 if that is not said, or not as a number."""
    for word, behind in zip(words, [*words[1:], ""]):
        if match := _NUMBER_OF_RANKS.fullmatch(word):
            value = match[1] or behind
            return int(value) if value.isdecimal() else 0
        if word.endswith(".py"):
            break
    return 0


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
