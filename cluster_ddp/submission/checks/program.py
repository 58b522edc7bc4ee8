"""Check before the submission that a command's program exists, and the script that it names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.agent.python_command import ASSIGNMENT, SHELLS, is_python, program_words, python_target
from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.submission.checks.performance_warnings import Advice
from cluster_ddp.submission.spec import JobSpec

_NONE = "there is no such program here."
_FOR_A_SHELL = re.compile(r"[;&|<>$`*?()#]|^\w+=")


def check(spec: JobSpec) -> list[Advice]:
    """Check that the command can start. In a container, it can't be known.

    Args:
        spec: the job. Its modules, conda environment or setup may provide a program that is not here.

    Raises:
        SpecError: there is no such program or script. The hint has the command that was probably meant.
    """
    if spec.container is not None or spec.container_image is not None:
        return []
    program, *arguments = spec.command
    path = os.pathsep.join([*([f"{spec.venv}/bin"] if spec.venv else []), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path) is None:
        asked = f"Running {program!r}:"
        if (said := _no_program(program, arguments)) is not None:
            raise SpecError(asked, *said)
        if spec.modules or spec.conda_env or spec.setup:
            text = f"{asked} {_NONE} The modules, the conda environment or the setup must provide it."
            return [Advice("command", text)]
        raise SpecError(asked, *_not_on_path(program, arguments))
    _check_script(program_words(spec.command) or list(spec.command))
    return []


def _no_program(program: str, arguments: Sequence[str]) -> tuple[str, str] | None:
    """What a word is that surely names no program, and the hint; None if it may be one."""
    rest = shlex.join([program, *arguments])
    if program.startswith("-"):
        return "it is an option, not a program.", f"options go before the two dashes: {program} … -- COMMAND"
    if any(blank in program for blank in " \t\n"):
        whole = " ".join([program, *map(shlex.quote, arguments)])
        found, hint = "it is a whole command line in quotes.", f"-- bash -c {shlex.quote(whole)}"
        if not _FOR_A_SHELL.search(whole):
            hint = f"leave out the quotes: -- {whole}; or let a shell run it: {hint}"
        return found, hint
    if ASSIGNMENT.fullmatch(program):
        return "it is the value of a variable, not a program.", f"-- env {rest}"
    if program.endswith(".py"):
        return "it is a Python script, which an interpreter must run.", f"-- python {rest}"
    return None


def _not_on_path(program: str, arguments: Sequence[str]) -> tuple[str, str]:
    """What a word is that no folder of the PATH has as a program, and the hint."""
    rest = shlex.join([program, *arguments])
    if not Path(program).is_file():
        check = f"your shell must find it: command -v {shlex.quote(program)}"
        return _NONE, f"check its spelling, or activate its environment first; {check}"
    found = (
        "it is a file that is not executable." if "/" in program else "it is a file here, not a program on the PATH."
    )
    return found, f"-- ./{rest}" if os.access(program, os.X_OK) and "/" not in program else f"-- bash {rest}"


def _check_script(words: Sequence[str]) -> None:
    """Check that an interpreter has a script to run."""
    name = Path(words[0]).name
    if is_python(words):
        kind, what = python_target(words)
        if kind == "nothing":
            raise SpecError(f"Running {shlex.join(words)}:", "it names no script.", f"-- {name} SCRIPT.py")
        script = what[0] if kind == "script" else ""
    elif name in SHELLS:
        if len(words) == 1:
            found = "it names no script, and a job has no terminal to read commands from."
            raise SpecError(f"Running {name}:", found, f"-- {name} SCRIPT.sh")
        script = "" if words[1].startswith("-") or shutil.which(words[1]) else words[1]
    else:
        return
    if not script or "{" in script:
        return
    if script.endswith(".ipynb"):
        made = shlex.quote(script.removesuffix("ipynb") + "py")
        hint = f"jupyter nbconvert --to script {shlex.quote(script)}; then: -- {name} {made}"
        raise SpecError(f"Running {script!r}:", "it is a notebook, which Python can't run.", hint)
    if not Path(script).exists():
        there = [path.name for path in Path.cwd().glob(f"*{Path(script).suffix}") if path.is_file()]
        found = f"there is no such file in {Path.cwd()}.{nearest(script, there)}"
        raise SpecError(f"Running {script!r}:", found, "paths are relative to where you submit")
