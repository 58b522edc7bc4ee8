"""Other processes: what Linux knows about them, and a word to the user who waits for one."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_SILENT_S = 2.0


@contextlib.contextmanager
def named_if_slow(what: str) -> Iterator[None]:
    """Say on a terminal what the body waits for, if it takes longer than two seconds.

    Args:
        what: such as "sinfo to answer".
    """

    def say() -> None:
        if sys.stderr.isatty():
            print(f"Waiting for {what} …", file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt).

    Args:
        pid: process id. A child that has ended can be read until it is waited for.
        number: the signal's number.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
