"""What a command lets Python run: where its own words end (`--launcher fork` puts itself there), what it imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.errors import SpecError

_PYTHON = re.compile(r"python[\d.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_IMPORT = re.compile(r"^\s*(import|from)\s+cluster_ddp\b", re.MULTILINE)
_NO_SCRIPT = set("cmihV")  # options, alone or in a group of letters, after which Python runs something else


def is_python(command: Sequence[str]) -> bool:
    """Whether a command's program is a Python interpreter."""
    return any(_PYTHON.fullmatch(Path(word).name) for word in list(command)[_program(command) :][:1])


def imports_us(command: Sequence[str]) -> bool:
    """Whether a Python command imports cluster_ddp, as far as its words and the scripts that they name tell.

    Python begins with warnings (USR1, USR2) ignored then: the import notes them from there on. Other scripts must not
    begin so. PyTorch Lightning (2.6) takes a signal that is ignored for one that has a handler, and would not save.
    """
    words = list(command)[_program(command) + 1 :] if is_python(command) else []
    return any(word.startswith("cluster_ddp.") or _IMPORT.search(word) or _IMPORT.search(_text(word)) for word in words)


def _text(word: str) -> str:
    """What is in a script; nothing of anything else."""
    try:
        return Path(word).read_text(errors="replace") if word.endswith(".py") else ""
    except OSError:
        return ""


def interpreter_words(command: Sequence[str]) -> int:
    """How many words of a command are its interpreter's: of `env A=1 python -u train.py --lr 1` four.

    Raises:
        SpecError: it isn't a script or module that Python runs.
    """
    words = list(command)
    at = _program(words)
    if not is_python(words):
        raise _error(words, "its program is no Python interpreter")
    at += 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "-m" and at + 1 < len(words):
            return at
        if word == "-" or (not word.startswith(_WITH_VALUE) and _NO_SCRIPT & set(word)):
            raise _error(words, f"with {word} Python runs no script of its own, or it is to stand alone (-m)")
        at += 2 if word in _WITH_VALUE else 1
    if at >= len(words):
        raise _error(words, "it names no script and no module")
    return at


def _program(words: Sequence[str]) -> int:
    """The place of the program, after `env` and the variables that it sets."""
    if not words or Path(words[0]).name != "env":
        return 0
    return next((at for at, word in enumerate(words) if at and not _ASSIGNMENT.fullmatch(word)), len(words))


def _error(words: Sequence[str], found: str) -> SpecError:
    return SpecError(
        f"Running {' '.join(words[:4])!r} with --launcher fork:",
        f"{found}; one process of each node imports torch and becomes its ranks, which run a Python script or module.",
        "--launcher srun starts any command for each rank; or -- python SCRIPT.py …",
    )
