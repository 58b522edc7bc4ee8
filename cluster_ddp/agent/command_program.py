"""What a command runs: the script or module of its Python interpreter or shell, behind their options and `env`.

The process that forks ranks takes its place there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cluster_ddp.errors import SpecError, nearest

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
"""A word that sets a variable, before a command in a shell or behind `env`."""
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_PYTHON = re.compile(r"python[\d.]*")
_BEHIND_ENV = re.compile(rf"(?P<with_value>-u|--unset|-C|--chdir)|--(unset|chdir)=.*|{ASSIGNMENT.pattern}", re.DOTALL)
_WITH_VALUE = ("--check-hash-based-pycs", "--rcfile", "--init-file")
# Letters of options, alone or in a group: those with which no script runs, and those with a value (-m: the module).
_OF_PYTHON, _OF_SHELLS = ("chV?", "WXm"), ("cs", "oO")


def program_words(command: Sequence[str]) -> list[str]:
    """Return a command's program and its arguments, without `env`, its options and the variables that it sets.

    But with `env -i`, which takes the variables of the rank away.
    """
    words = list(command)
    if not words or Path(words[0]).name != "env":
        return words
    at = 1
    while at < len(words) and (option := _BEHIND_ENV.fullmatch(words[at])):
        at += 2 if option["with_value"] else 1
    return words[at:]


def is_interpreter(name: str) -> bool:
    """Return whether a program of this name is a Python interpreter."""
    return _PYTHON.fullmatch(name) is not None


class Target(NamedTuple):
    """What the program of a command runs, if it is a Python interpreter or a shell."""

    kind: Literal["script", "module", "code", "nothing"]
    """"code" is that of -c, of the input, or what -V and -h print."""
    words: list[str]
    """The script, module or code, and its arguments."""
    at: int
    """Index in the command of the script, or of the option that decides: -m, -c."""
    program: Literal["python", "shell", "other"]


def target(command: Sequence[str], *, no_script: str = "") -> Target:
    """Return what the Python interpreter or the shell of a command runs: nothing, if it is another program.

    Args:
        command: the program and its arguments.
        no_script: letters of more options with which no script counts as run.
    """
    words = list(command)
    at = len(words) - len(program_words(words)) + 1
    name = Path(words[at - 1]).name if at <= len(words) else ""
    if not (is_interpreter(name) or name in SHELLS):
        return Target("nothing", [], 0, "other")
    program: Literal["python", "shell"] = "shell" if name in SHELLS else "python"
    code, with_value = _OF_SHELLS if name in SHELLS else _OF_PYTHON
    while at < len(words) and words[at].startswith(("-", "+")):
        option, letter, attached = words[at], "", ""
        if not option.startswith("--"):
            _, letter, attached = re.split(f"([{code}{with_value}{no_script}]|$)", option[1:], maxsplit=1)
        if option in ("-", "--help", "--version") or (letter and letter in code + no_script):
            return Target("code", words[at + 1 :], at, program)
        if letter == "m":
            return Target("module", [*filter(None, [attached]), *words[at + 1 :]], at, program)
        # To a letter of a shell, such as -oe, belongs the next word (bash(1)).
        at += 2 if option in _WITH_VALUE or (letter and (name in SHELLS or not attached)) else 1
    return Target("script" if at < len(words) else "nothing", words[at:], at, program)


def interpreter(command: Sequence[str]) -> str:
    """Return the Python interpreter of a command; "python", the first on the PATH, for any other program."""
    return program_words(command)[0] if target(command).program == "python" else "python"


def interpreter_words(command: Sequence[str]) -> int:
    """Count the words of a command before its script or module: four in `env A=1 python -u train.py --lr 1`.

    Raises:
        SpecError: Python does not run a script or module in it.
    """
    run = target(command, no_script="i")  # a process that forks ranks can't be interactive
    is_module = run.kind == "module" and command[run.at] == "-m" and bool(run.words)
    if run.program == "python" and (run.kind == "script" or is_module):
        return run.at
    raise SpecError(
        f"Running {' '.join(command[:4])!r} with --launcher fork:",
        "its program does not run a Python script, or a module with -m as a word of its own. One process per node "
        "imports torch, then forks the ranks, which run that.",
        "use --launcher srun, which runs any command; or a script: -- python SCRIPT.py …",
    )


def check_script(command: Sequence[str], folder: Path, hint: str) -> None:
    """Check that the script of an interpreter or a shell is there: each rank would say so, after srun has started.

    Raises:
        SpecError: there is no such file in the folder; the error has the hint. Or it is a notebook.
    """
    words, run = program_words(command), target(command)
    if run.kind != "script":
        return
    script, found = run.words[0], ""
    if script.endswith(".ipynb"):
        found = f"it is a notebook, which {'Python' if run.program == 'python' else 'a shell'} can't run."
        hint = "jupyter nbconvert --to script NOTEBOOK; then: -- python SCRIPT"
    elif any(word.startswith(("-C", "--chdir")) for word in command[: -len(words)]):
        return
    elif not (folder / script).exists() and not (run.program == "shell" and shutil.which(script)):
        there = [path.name for path in folder.glob(f"*{Path(script).suffix}") if path.is_file()]
        found = f"there is no such file in {folder}.{nearest(script, there)}"
    if found:
        raise SpecError(f"Running {script!r}:", found, hint)
