"""Tells the user at a terminal what a slow command waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

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
