"""The words of a command: there must be such a program and such a script; no shell reads its operators."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from cluster_ddp.agent.array_values import ARRAY_TASK
from cluster_ddp.agent.python_command import ASSIGNMENT, SHELLS, is_python, program_words, python_target
from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.submission.checks.performance_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

_NONE = "there is no such program here."
_FOR_A_SHELL = re.compile(r"[;&|<>$`*?()#]|^\w+=")
_OPERATORS = ("|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
_PLACEHOLDER = re.compile(r"(?:--?[\w-]+=)?\{([A-Za-z_]\w*)\}")  # {lr} and --lr={lr}; the program may want other braces


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


def check(spec: JobSpec) -> list[Advice]:
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
    asked, said = f"Running {program!r}:", _no_program(spec.command)
    if said is None and (spec.modules or spec.conda_env or spec.setup):
        text = f"{asked} {_NONE} The modules, the conda environment or the setup must provide it."
        return [Advice("command", text)]
    raise SpecError(asked, *(said or _not_on_path(spec.command)))


def _no_program(command: Sequence[str]) -> tuple[str, str] | None:
    """What a first word is that surely names no program, and the hint; None if it may be one."""
    program, rest = command[0], shlex.join(command)
    if program.startswith("-"):
        return "it is an option, not a program.", f"options go before the two dashes: {program} … -- COMMAND"
    if any(blank in program for blank in " \t\n"):
        whole = " ".join([program, *map(shlex.quote, command[1:])])
        hint = f"-- bash -c {shlex.quote(whole)}"
        if not _FOR_A_SHELL.search(whole):
            hint = f"leave out the quotes: -- {whole}; or let a shell run it: {hint}"
        return "it is a whole command line in quotes.", hint
    if ASSIGNMENT.fullmatch(program):
        return "it is the value of a variable, not a program.", f"-- env {rest}"
    if program.endswith(".py"):
        return "it is a Python script, which an interpreter must run.", f"-- python {rest}"
    return None


def _not_on_path(command: Sequence[str]) -> tuple[str, str]:
    """What a first word is that no folder of the PATH has as a program, and the hint."""
    program, rest = command[0], shlex.join(command)
    if not Path(program).is_file():
        look = f"your shell must find it: command -v {shlex.quote(program)}"
        return _NONE, f"check its spelling, or activate its environment first; {look}"
    if "/" in program:
        return "it is a file that is not executable.", f"-- bash {rest}"
    return (
        "it is a file here, not a program on the PATH.",
        f"-- {'./' if os.access(program, os.X_OK) else 'bash '}{rest}",
    )


def _check_script(words: Sequence[str]) -> None:
    """Check that an interpreter has a script to run."""
    name, script, asked = Path(words[0]).name, "", f"Running {shlex.join(words)}:"
    if is_python(words):
        target = python_target(words)
        if target.kind == "nothing":
            raise SpecError(asked, "it names no script.", f"-- {name} SCRIPT.py")
        script = target.words[0] if target.kind == "script" else ""
    elif name in SHELLS:
        if len(words) == 1:
            found = "it names no script, and a job has no terminal to read commands from."
            raise SpecError(asked, found, f"-- {name} SCRIPT.sh")
        script = "" if words[1].startswith("-") or shutil.which(words[1]) else words[1]
    if script.endswith(".ipynb"):
        made = shlex.quote(script.removesuffix("ipynb") + "py")
        hint = f"jupyter nbconvert --to script {shlex.quote(script)}; then: -- {name} {made}"
        raise SpecError(f"Running {script!r}:", "it is a notebook, which Python can't run.", hint)
    if script and "{" not in script and not Path(script).exists():
        there = [path.name for path in Path.cwd().glob(f"*{Path(script).suffix}") if path.is_file()]
        found = f"there is no such file in {Path.cwd()}.{nearest(script, there)}"
        raise SpecError(f"Running {script!r}:", found, "paths are relative to where you submit")
