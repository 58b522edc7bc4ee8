"""Parse a Python command: where its script or module begins; `--launcher fork` puts itself there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cluster_ddp.errors import SpecError

_PYTHON = re.compile(r"python[\d.]*")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
"""A word that sets a variable, before a command in a shell or behind `env`."""
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_ENV_WITH_VALUE = ("-u", "--unset", "-C", "--chdir")
_ENV_VALUE_ATTACHED = ("--unset=", "--chdir=")
_CODE = "chV?"  # option letters, alone or in a group, with which Python runs no script


def program_words(command: Sequence[str]) -> list[str]:
    """Return a command's program and its arguments, without `env`, its options and the variables that it sets."""
    return list(command)[_program(command) :]


def is_python(command: Sequence[str]) -> bool:
    """Return whether a command's program is a Python interpreter."""
    return any(is_interpreter(Path(word).name) for word in program_words(command)[:1])


def is_interpreter(name: str) -> bool:
    """Return whether a program of this name is a Python interpreter."""
    return _PYTHON.fullmatch(name) is not None


class PythonTarget(NamedTuple):
    """What a Python interpreter runs."""

    kind: Literal["script", "module", "code", "nothing"]
    """"code" is that of -c, of the input, or what -V and -h print."""
    words: list[str]
    """The script or the module, and its arguments."""
    at: int
    """Index in the command of the script, or of the option that decides: -m, -c."""


def python_target(command: Sequence[str], code: str = _CODE) -> PythonTarget:
    """Return what the Python interpreter of a command runs: nothing, if its program is another one.

    Args:
        command: the program and its arguments.
        code: letters of options with which it counts as code.
    """
    if not is_python(command):
        return PythonTarget("nothing", [], 0)
    words, at = list(command), _program(command) + 1
    while at < len(words) and words[at].startswith("-"):
        option = words[at]
        letters = "" if option.startswith(("--", *_WITH_VALUE)) else option[1:]
        flags, m, attached = letters.partition("m")  # -mpdb
        if option in ("-", "--help", "--version") or set(code) & set(flags):
            return PythonTarget("code", [], at)
        if m:
            return PythonTarget("module", [*([attached] if attached else []), *words[at + 1 :]], at)
        at += 2 if option in _WITH_VALUE else 1
    return PythonTarget("script" if at < len(words) else "nothing", words[at:], at)


def shell_script(command: Sequence[str]) -> str:
    """Return the script that a shell runs in a command; empty for other programs, and for code (-c, -s)."""
    shell, *words = program_words(command) or [""]
    at = 0
    while at < len(words) and words[at].startswith(("-", "+")) and words[at] != "--":
        letters = set() if words[at].startswith("--") else set(words[at])
        if letters & {"c", "s"}:
            return ""
        at += 2 if letters & {"o", "O"} or words[at] in ("--rcfile", "--init-file") else 1
    script = next((word for word in words[at:] if word != "--"), "")
    return script if Path(shell).name in SHELLS else ""


def interpreter(command: Sequence[str]) -> str:
    """Return the Python interpreter of a command; "python", the first on the PATH, for any other program."""
    return program_words(command)[0] if is_python(command) else "python"


def doctor(command: Sequence[str]) -> list[str]:
    """Return the command that examines a node by the Python of a command, in seconds."""
    return [interpreter(command), "-m", "cluster_ddp.doctor", "--quick"]


def interpreter_words(command: Sequence[str]) -> int:
    """Count the words of a command before its script or module: four in `env A=1 python -u train.py --lr 1`.

    Raises:
        SpecError: Python does not run a script or module in it.
    """
    words = list(command)
    if not is_python(words):
        raise _error(words, "its program is no Python interpreter")
    target = python_target(words, code=f"{_CODE}i")  # a process that forks ranks can't be interactive
    if target.kind == "nothing":
        raise _error(words, "it names neither a script nor a module")
    word = words[target.at]
    if target.kind == "code" or (target.kind == "module" and (word != "-m" or not target.words)):
        raise _error(words, f"with {word}, Python runs no script (write -m as a word of its own)")
    return target.at


def check_script(command: Sequence[str], folder: Path) -> None:
    """Check that the script of a Python command is there: Python would say so on each rank, after srun has started.

    Raises:
        SpecError: there is no such file.
    """
    words = program_words(command)
    if any(word.startswith(("-C", "--chdir")) for word in command[: -len(words)]):
        return
    target = python_target(command)
    if target.kind == "script" and not (folder / target.words[0]).exists():
        found, hint = f"there is no such file in {folder}.", "start it in its folder; or sbatch --chdir=FOLDER SCRIPT"
        raise SpecError(f"Running {target.words[0]}:", found, hint)


def _program(words: Sequence[str]) -> int:
    """Index of the program, after `env`, its options and the variables that it sets.

    But not after -i, which takes the variables of the rank away: such a command is left as it is.
    """
    if not words or Path(words[0]).name != "env":
        return 0
    at = 1
    while at < len(words) and (
        words[at] in _ENV_WITH_VALUE or words[at].startswith(_ENV_VALUE_ATTACHED) or ASSIGNMENT.fullmatch(words[at])
    ):
        at += 2 if words[at] in _ENV_WITH_VALUE else 1
    return min(at, len(words))


def _error(words: Sequence[str], found: str) -> SpecError:
    return SpecError(
        f"Running {' '.join(words[:4])!r} with --launcher fork:",
        f"{found}. One process per node imports torch, then forks the ranks, which run a Python script or module.",
        "use --launcher srun, which runs any command; or a script: -- python SCRIPT.py …",
    )
