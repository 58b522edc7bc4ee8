"""Printing that does not end a training when the disk is full or a pipe is closed."""

from __future__ import annotations

import os
import sys


def say(text: str, end: str = "\n") -> None:
    """Print a text and `end` at once. If stdout fails, say so once on stderr and drop all later lines."""
    try:
        try:
            print(text, end=end, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), end=end, flush=True)
    except (OSError, ValueError) as error:  # ValueError: somebody closed it
        # Its buffer would fail again at exit, and Python would end with status 120.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        complain(f"stdout takes no more output ({error}); training continues without it.")


def complain(text: str) -> None:
    """Write a line to stderr in one piece, so that lines of several ranks don't mix. Failures are ignored."""
    if sys.stderr is None:  # there was none when Python started
        return
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
