"""What is wrong with a command: it starts all ranks again, has no such program or script, or is text for a shell.

`submit --nodes 2 --gpus-per-node 2 -- torchrun --nproc-per-node 2 train.py` would run four separate trainings of two
ranks each, and look successful. `srun` in a task waits for ever for CPUs that the task has.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.array_values import ARRAY_TASK
from cluster_ddp.agent.command_program import ASSIGNMENT, SHELLS, is_interpreter, program_words, target
from cluster_ddp.errors import SpecError, counted, nearest
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

CODE = "nested"
"""The code that accepts a command that starts ranks itself: --accept nested."""

_NONE = "there is no such program here."
_OPERATORS = ("|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
_PLACEHOLDER = re.compile(r"(?:--?[\w-]+=)?\{([A-Za-z_]\w*)\}")  # {lr} and --lr={lr}; the program may want other braces

# Programs that run the one behind them. Some are such a program with one verb only.
_RUN_ANOTHER = (
    *("env", "time", "nohup", "nice", "ionice", "setsid", "stdbuf", "timeout", "numactl", "taskset", "exec", "command"),
    *("if", "then", "else", "while", "do", "!", "{"),
    *(f"{name} run" for name in ("uv", "poetry", "pipenv", "pixi", "hatch", "conda", "mamba", "micromamba")),
)
_STARTS_RANKS = "starts ranks itself. Each of the {} ranks of this job would start them again."
_ASKS_FOR_TASKS = "asks Slurm for tasks. The job starts this command in each of its tasks already."
_ASKS_FOR_A_JOB = "asks for a job of its own, so this job would only submit another."
_WITHOUT = "-- {}, without {{}} and its options"
_AS_TORCHRUN = _STARTS_RANKS, f"--launcher torchrun {_WITHOUT.format('python SCRIPT …')}"
_AS_PYTHON = _STARTS_RANKS, _WITHOUT.format("python SCRIPT …")
# A program, with its verb, or a module behind `python -m` -> what it does in a job, and what to submit instead.
_LAUNCHERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), _AS_TORCHRUN),
    **dict.fromkeys(("accelerate launch", "accelerate.commands.launch"), _AS_TORCHRUN),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), _AS_PYTHON),
    **dict.fromkeys(("horovodrun", "mpirun", "mpiexec"), (_STARTS_RANKS, _WITHOUT.format("COMMAND"))),
    "srun": (_ASKS_FOR_TASKS, _WITHOUT.format("COMMAND")),
    **dict.fromkeys(("sbatch", "salloc"), (_ASKS_FOR_A_JOB, "run {} without cluster-ddp")),
}
_FIRST_WORDS = {key.split()[0] for key in (*_LAUNCHERS, *_RUN_ANOTHER)}
_NUMBER_OF_RANKS = r"(?<!\S)(?:--nproc[-_]per[-_]node|--num[-_]processes|--num_gpus|--ntasks|-np?|--np)[= ](\d+)(?!\S)"


def advise(command: Sequence[str], grid: Container[str]) -> Iterator[Advice]:
    """Warn of placeholders without a grid, and of a shell's operators."""
    names = [match[1] for match in map(_PLACEHOLDER.fullmatch, command) if match and match[1] != ARRAY_TASK]
    if names and not grid:
        text = f"The command gets {' and '.join(f'{{{name}}}' for name in names)} as plain text. To give values: "
        yield Advice("placeholder", f"{text}--array {' '.join(f'{name}=…' for name in names)}")
    if operators := [word for word in command if word in _OPERATORS]:
        text = f"The command gets {' and '.join(operators)} as plain text; no shell reads it. To use a shell: "
        status = "-o pipefail " if "|" in operators else ""  # else that of tee, not that of the training
        yield Advice("shell", f"{text}-- bash {status}-c {shlex.quote(' '.join(command))}")


class Nested(NamedTuple):
    """A command that starts ranks itself."""

    found: str
    """What it does, as a sentence."""
    instead: str
    """The options and the command that are meant."""
    ranks: int = 0
    """Number of ranks that its options ask for; 0 if they name none."""


def check_launcher(spec: JobSpec) -> None:
    """Refuse a command that starts ranks itself. One task may start one a GPU, but not by Slurm's commands.

    Raises:
        SpecError: the command does. The hint says what to submit instead.
    """
    nested = nested_launcher(spec.command, tasks=spec.nodes * spec.ranks_per_node, gpus=spec.gpus_per_node)
    if nested is not None:
        size = f"--gpus-per-node {nested.ranks} " if spec.world_size == 1 and nested.ranks > spec.gpus_per_node else ""
        hint = f"{size}{nested.instead}; to submit it anyway: --accept {CODE}"
        raise SpecError(f"Submitting {shlex.join(spec.command)}:", nested.found, hint)


def nested_launcher(command: Sequence[str], *, tasks: int, gpus: int | None) -> Nested | None:
    """Return what is wrong with a command that so many tasks run, if it starts ranks itself. `gpus` are a node's."""
    launcher = _launcher(command)
    if launcher is None:
        return None
    name, (does, instead) = launcher.split()[0], _LAUNCHERS[launcher]
    options = re.split(r"\.py\b|\s-m\s", " ".join(command).partition(name)[2])[0]  # up to its script or module
    number = re.search(_NUMBER_OF_RANKS, options)
    ranks = int(number[1]) if number else 0
    if does == _STARTS_RANKS and tasks == 1:
        if gpus is None or ranks <= gpus:
            return None
        does = f"starts {ranks} ranks, and this job has {counted(gpus, 'GPU')}."
    return Nested(f"{name} {does.format(tasks)}", instead.format(name), ranks)


def _launcher(words: Sequence[str]) -> str | None:
    """The launcher that a command begins with, behind programs such as `env`, `uv run` and Python; None without one."""
    rest = list(words)
    while rest:
        name = Path(rest[0]).name
        keys = (" ".join([name, *rest[1:2]]), name)
        if found := next((key for key in keys if key in _LAUNCHERS), None):
            return found
        run = target(rest)
        if name in SHELLS:
            return _in_text(run.words[0]) if run.kind == "code" and run.words else None
        if is_interpreter(name):
            rest = run.words if run.kind != "code" else []
        elif another := next((key for key in keys if key in _RUN_ANOTHER), None):
            rest = _behind_options(rest[len(another.split()) :])
        elif ASSIGNMENT.fullmatch(name):
            rest = rest[1:]
        else:
            return None  # another program, or a script
    return None


def _behind_options(words: list[str]) -> list[str]:
    """The words behind the options of a program that runs another: that one, or a word of its own (timeout 10)."""
    while words and (words[0].startswith("-") or words[0][:1].isdigit() or ASSIGNMENT.fullmatch(words[0])):
        value = next(iter(words[1:]), "") if words[0].startswith("-") else ""
        is_program = value in _FIRST_WORDS or is_interpreter(Path(value).name) or shutil.which(value)
        words = words[1 if not value or value.startswith("-") or is_program else 2 :]
    return words


def _in_text(text: str) -> str | None:
    """The launcher in a text that a shell runs."""
    tokens = shlex.shlex(text.replace("\\\n", " ").replace("\n", "\n;\n"), posix=True, punctuation_chars=True)
    tokens.whitespace_split = True
    with suppress(ValueError):  # unbalanced quotes: bash will say so
        for is_operator, words in itertools.groupby([*tokens], lambda token: set(token) <= set(";&|()<>")):
            if not is_operator and (found := _launcher([*words])):
                return found
    return None


def check_program(spec: JobSpec) -> list[Advice]:
    """Check that the command can start. In a container, it can't be known.

    Args:
        spec: the job. Its modules, conda environment or setup may provide a program that is not here.

    Raises:
        SpecError: there is no such program or script. The hint has the command that was probably meant.
    """
    if spec.container is not None or spec.container_image is not None:
        return []
    program = spec.command[0]
    path = os.pathsep.join([*([f"{spec.venv}/bin"] if spec.venv else []), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path) is not None:
        _check_script(program_words(spec.command) or list(spec.command))
        return []
    may_come = bool(spec.modules or spec.conda_env or spec.setup)
    asked, said = f"Running {program!r}:", _no_program(spec.command, may_come=may_come)
    if said is None:
        text = f"{asked} {_NONE} The modules, the conda environment or the setup must provide it."
        return [Advice("command", text)]
    raise SpecError(asked, *said)


def _no_program(command: Sequence[str], *, may_come: bool) -> tuple[str, str] | None:
    """What a first word is that is no program here, and the hint; None if it `may_come` with the job's environment."""
    program, rest = command[0], shlex.join(command)
    if program.startswith("-"):
        return "it is an option, not a program.", f"options go before the two dashes: {program} … -- COMMAND"
    if any(blank in program for blank in " \t\n"):
        whole = shlex.quote(" ".join([program, *map(shlex.quote, command[1:])]))
        return (
            "it is a whole command line in quotes.",
            f"leave out the quotes; or let a shell run it: -- bash -c {whole}",
        )
    if ASSIGNMENT.fullmatch(program):
        return "it is the value of a variable, not a program.", f"-- env {rest}"
    if program.endswith(".py"):
        return "it is a Python script, which an interpreter must run.", f"-- python {rest}"
    if may_come:
        return None
    if not Path(program).is_file():
        look = f"your shell must find it: command -v {shlex.quote(program)}"
        return _NONE, f"check its spelling, or activate its environment first; {look}"
    if os.access(program, os.X_OK):
        return "it is a file here, not a program on the PATH.", f"-- ./{rest}"
    return "it is a file that is not executable.", f"-- bash {rest}"


def _check_script(words: Sequence[str]) -> None:
    """Check that an interpreter has a script to run."""
    name, run, asked = Path(words[0]).name, target(words), f"Running {shlex.join(words)}:"
    if run.kind == "nothing" and (is_interpreter(name) or name in SHELLS):
        found = "it names no script, and a job has no terminal to read commands from."
        raise SpecError(asked, found, f"-- {name} SCRIPT")
    script = run.words[0] if run.kind == "script" else ""
    if script.endswith(".ipynb"):
        made = shlex.quote(script.removesuffix("ipynb") + "py")
        hint = f"jupyter nbconvert --to script {shlex.quote(script)}; then: -- {name} {made}"
        raise SpecError(f"Running {script!r}:", "it is a notebook, which Python can't run.", hint)
    is_found = Path(script).exists() or (name in SHELLS and shutil.which(script))
    if script and "{" not in script and not is_found:
        there = [path.name for path in Path.cwd().glob(f"*{Path(script).suffix}") if path.is_file()]
        found = f"there is no such file in {Path.cwd()}.{nearest(script, there)}"
        raise SpecError(f"Running {script!r}:", found, "paths are relative to where you submit")
