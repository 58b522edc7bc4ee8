"""What Linux knows about other processes."""

from __future__ import annotations

from pathlib import Path


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
