"""What Linux tells about other processes."""

from __future__ import annotations

from pathlib import Path


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt).

    Args:
        pid: a process that has not been waited for; of one that has ended it can still be read.
        number: the signal.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
