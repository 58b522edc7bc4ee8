"""Printing that a full disk or a closed pipe can't end a night of training with."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line at once; where stdout takes no more, say so once on stderr, and no more."""
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except (OSError, ValueError) as error:  # ValueError: somebody closed it
        # What is still in its buffer would fail again, and Python would end with status 120 for it.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        complain(f"stdout takes no more output ({error}); training continues without it.")


def complain(text: str) -> None:
    """Write a line to stderr in one piece, so that lines of several ranks don't mix; be silent if that fails."""
    if sys.stderr is None:  # there was none when Python started
        return
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
