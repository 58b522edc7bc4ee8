"""What is wrong with a command: it starts all ranks again, has no such program or script, or is text for a shell.

`submit --nodes 2 --gpus-per-node 2 -- torchrun --nproc-per-node 2 train.py` would run four separate trainings of two
ranks each, and look successful. `srun` in a task waits for ever for CPUs that the task has.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cluster_ddp.agent.array_values import ARRAY_TASK
from cluster_ddp.agent.command_program import ASSIGNMENT, check_script, target
from cluster_ddp.errors import SpecError, counted
from cluster_ddp.submission.checks.job_environment import search_path
from cluster_ddp.submission.checks.job_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

CODE = "nested"
"""The code that accepts a command that starts ranks itself: --accept nested."""

_OPERATORS = ("|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
_PLACEHOLDER = re.compile(r"(?:--?[\w-]+=)?\{([A-Za-z_]\w*)\}")  # {lr} and --lr={lr}; the program may want other braces

_STARTS_RANKS = "starts ranks itself. Each of the {} ranks of this job would start them again."
_ASKS_FOR_TASKS = "asks Slurm for tasks. The job starts this command in each of its tasks already."
_ASKS_FOR_A_JOB = "asks for a job of its own, so this job would only submit another."
_WITHOUT = "-- COMMAND (such as python SCRIPT), without {} and its options"
_RANK_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate launch"),
    *("accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner", "horovodrun", "mpirun", "mpiexec"),
)
# A program, with its verb, or a module behind `python -m` -> what it does in a job, and what to submit instead.
_LAUNCHERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_RANK_LAUNCHERS, (_STARTS_RANKS, _WITHOUT)),
    "srun": (_ASKS_FOR_TASKS, _WITHOUT),
    **dict.fromkeys(("sbatch", "salloc"), (_ASKS_FOR_A_JOB, "run {} without cluster-ddp")),
}
# Programs that run the one behind them, some by their verb `run`, and words of a shell.
_RUN_ANOTHER = (
    *("env", "time", "nohup", "nice", "ionice", "setsid", "stdbuf", "timeout", "numactl", "taskset", "exec", "command"),
    *("uv", "poetry", "pipenv", "pixi", "hatch", "conda", "mamba", "micromamba"),
    *("if", "then", "else", "while", "do", "!", "{"),
)
_NUMBER_OF_RANKS = r"(?<!\S)(?:--nproc[-_]per[-_]node|--num[-_]processes|--num_gpus|--ntasks|-np?|--np)[= ](\d+)(?!\S)"

# A first word that is no program's name: its form, what it is, and what to write.
_NO_PROGRAMS = (
    (r"-.*", "it is an option, not a program.", "options go before the two dashes"),
    (r".*\s.*", "it is a whole command line in quotes.", "leave out the quotes; or use a shell: -- bash -c 'COMMAND'"),
    (ASSIGNMENT.pattern, "it is the value of a variable, not a program.", "-- env NAME=VALUE COMMAND"),
    (r".*\.py", "it is a Python script, which an interpreter must run.", "-- python SCRIPT"),
)


def advise(command: Sequence[str], grid: Container[str]) -> Iterator[Advice]:
    """Warn of placeholders without a grid, and of a shell's operators."""
    names = [match[1] for match in map(_PLACEHOLDER.fullmatch, command) if match and match[1] != ARRAY_TASK]
    if names and not grid:
        text = f"The command gets {' and '.join(f'{{{name}}}' for name in names)} as plain text. To give values: "
        yield Advice("placeholder", f"{text}--array {' '.join(f'{name}=…' for name in names)}")
    if operators := [word for word in command if word in _OPERATORS]:
        text = f"The command gets {' and '.join(operators)} as plain text; no shell reads it. To use a shell: "
        yield Advice("shell", f"{text}-- bash -o pipefail -c 'COMMAND'")  # else | has the status of its last program


def check_launcher(command: Sequence[str], *, tasks: int, gpus: int | None, is_submission: bool = False) -> None:
    """Refuse a command that starts ranks itself. One task may start one a GPU, but not by Slurm's commands.

    Args:
        command: the command.
        tasks: number of tasks that run it.
        gpus: number of GPUs of a node; None if unknown.
        is_submission: whether options of `submit` help: the hint names them.

    Raises:
        SpecError: the command does.
    """
    launcher = _launcher(command)
    if launcher is None:
        return
    name, (does, instead) = launcher.split()[0], _LAUNCHERS[launcher]
    options = re.split(r"\.py\b|\s-m\s", " ".join(command).partition(name)[2])[0]  # up to its script or module
    number = re.search(_NUMBER_OF_RANKS, options)
    ranks = int(number[1]) if number else 0
    if does == _STARTS_RANKS and tasks == 1:
        if gpus is None or ranks <= gpus:
            return
        does = f"starts {ranks} ranks, and this job has {counted(gpus, 'GPU')}."
    hint = instead.format(name)
    if is_submission:
        size = f"--gpus-per-node {ranks} " if tasks == 1 and ranks > (gpus or 0) else ""
        hint = f"{size}{hint}; to submit it anyway: --accept {CODE}"
    raise SpecError(f"Running {shlex.join(command)}:", f"{name} {does.format(tasks)}", hint)


def _launcher(words: Sequence[str]) -> str | None:
    """The launcher that a command begins with, behind programs such as `env`, `uv run` and Python; None without one."""
    is_value = False  # whether a word may be the value of an option of a program that runs another
    for at, word in enumerate(words):
        is_path = is_value and "/" in word and shutil.which(word) is None  # conda run -p /envs/deepspeed
        if word.startswith("-") or is_path or ASSIGNMENT.fullmatch(word):
            is_value = word.startswith("-")
            continue
        name, rest = Path(word).name, words[at:]
        if found := next((key for key in (" ".join([name, *rest[1:2]]), name) if key in _LAUNCHERS), None):
            return found
        run = target(rest)
        if run.program == "shell":
            return _in_text(run.words[0]) if run.kind == "code" and run.words else None
        if run.program == "python":
            return _launcher(run.words) if run.kind != "code" else None
        is_passed = name in _RUN_ANOTHER or (at > 0 and (word[:1].isdigit() or word == "run"))  # timeout 10; uv run
        if not is_passed and (not is_value or shutil.which(word)):
            return None  # another program, or a script
        is_value = False
    return None


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
        SpecError: there is no such program or script. The hint has the form of the command that was probably meant.
    """
    if spec.container is not None or spec.container_image is not None:
        return []
    program = spec.command[0]
    if shutil.which(program, path=search_path(spec)) is not None:
        run = target(spec.command)
        if run.kind == "nothing" and run.program != "other":
            found = "it names no script, and a job has no terminal to read commands from."
            raise SpecError(f"Running {shlex.join(spec.command)}:", found, "-- python SCRIPT, or -- bash SCRIPT")
        if not any("{" in word for word in run.words[:1]):  # a task of an array may fill it in
            check_script(spec.command, Path.cwd(), "paths are relative to where you submit")
        return []
    asked = f"Running {program!r}:"
    for form, found, hint in _NO_PROGRAMS:
        if re.fullmatch(form, program, re.DOTALL):
            raise SpecError(asked, found, hint)
    if Path(program).is_file():
        found = "it is a file here, but no program on the PATH, or it is not executable."
        raise SpecError(asked, found, "-- ./PROGRAM, after chmod +x PROGRAM; for a script of a shell: -- bash SCRIPT")
    found = "there is no such program here."
    if spec.modules or spec.conda_env or spec.setup:
        text = f"{asked} {found} The modules, the conda environment or the setup must provide it."
        return [Advice("command", text)]
    raise SpecError(asked, found, "check its spelling, or activate its environment first")
