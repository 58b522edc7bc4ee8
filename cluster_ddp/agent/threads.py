"""Threads beside the main one, which waits for signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread that takes no signals, and does not keep the process alive.

    The kernel gives a signal to any thread that does not block it. The main one, which waits for it, could miss the end
    of a child or a warning.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a thread inherits what is blocked
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread
