"""Signals of a job: which are passed on to a command, and which process can take one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp import processes

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""They come some time before the end, and by themselves should not end a process."""

_KERNELS = "KILL STOP CHLD CONT TSTP TTIN TTOU SEGV BUS FPE ILL ABRT TRAP SYS PIPE WINCH URG PROF VTALRM STKFLT"

PASSED_ON = tuple(one for one in signal.Signals if one.name[3:] not in _KERNELS.split())
"""Signals of people and of Slurm (scancel --signal, sbatch --signal): those that come from outside."""

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
"""They can't trap a signal that was ignored when they started (POSIX, trap)."""


def takers(pid: int, number: int) -> list[int]:
    """Return who has a handler for a signal: a command itself, or else those nearest below it; empty if nobody.

    Args:
        pid: the command's process. A child that has ended can be looked at until it is waited for.
        number: the signal.
    """
    level = [pid]
    while level:
        found = []
        for one in level:
            with contextlib.suppress(OSError, IndexError):
                found += [one] if processes.catches(one, number) else []
        if found:
            return found
        level = [child for one in level for child in processes.children(one)]
    return []


def are_typed() -> bool:
    """Whether this process is in the foreground of a terminal: what is typed there, such as Ctrl-C, reaches all."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def is_shell(command: Sequence[str]) -> bool:
    """Whether a command begins with a shell."""
    return bool(command) and Path(command[0]).name in SHELLS
