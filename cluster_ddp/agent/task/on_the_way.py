"""Signals on their way to commands: a warning waits for a handler, and TERM for what a shell has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from cluster_ddp import processes
from cluster_ddp.agent.task import signals

_FIRST_S, _LONGEST_S = 0.2, 5.0  # from one look to the next: a command may never have a handler
_ENDING_S = 1.0  # a shell needs less to end after what it has started


class _Look(NamedTuple):
    at: float  # on the clock of time.monotonic()
    then_s: float  # to the next one


class OnTheWay:
    """Signals that commands are to get.

    Args:
        takers: says which processes get a signal other than TERM for a command; none: not yet.
    """

    def __init__(self, takers: Callable[[int, int], Sequence[int]]) -> None:
        self._takers = takers
        self._looks: dict[tuple[int, signal.Signals], _Look] = {}
        self._saving: dict[int, set[tuple[int, str]]] = {}  # of a shell: who has got TERM in its place

    @property
    def due(self) -> float:
        """When `deliver` has something to do, on the clock of time.monotonic()."""
        return min((look.at for look in self._looks.values()), default=float("inf"))

    def add(self, pids: Iterable[int], number: signal.Signals, *, wait_s: float = 0.0) -> None:
        """Send a signal to commands, those that still run in so many seconds."""
        for pid in pids:
            self._looks.setdefault((pid, number), _Look(time.monotonic() + wait_s, _FIRST_S))

    def deliver(self, running: Container[int]) -> None:
        """Send what can be sent now to commands that run."""
        now = time.monotonic()
        for (pid, number), (at, then_s) in list(self._looks.items()):
            if pid in running and now < at:
                continue
            del self._looks[pid, number]
            is_term = number == signal.SIGTERM
            if pid in running and (wait_s := self._end(pid) if is_term else self._warn(pid, number, then_s)):
                self._looks[pid, number] = _Look(now + wait_s, wait_s)

    def _warn(self, pid: int, number: int, then_s: float) -> float:
        """Send a signal to who can take it. Returns seconds to the next look; 0 if it is sent.

        If nobody can, it waits: the command would die of it.
        """
        for one in (takers := self._takers(pid, number)):
            send(one, number)
        return 0.0 if takers else min(1.1 * then_s, _LONGEST_S)

    def _end(self, pid: int) -> float:
        """Send TERM to a command; to a shell, once those have ended that save in its place. Returns as `_warn` does."""
        saving = {(one, begun) for one in signals.saving_below(pid) if (begun := processes.started(one))}
        told = self._saving.pop(pid, set())
        for one, _ in saving - told:
            send(one, signal.SIGTERM)
        if saving:
            self._saving[pid] = saving
        elif not told:
            send(pid, signal.SIGTERM)
        return _FIRST_S if saving else _ENDING_S if told else 0.0


def send(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended, or runs as somebody else."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        if number == signal.SIGTERM:
            os.kill(pid, signal.SIGCONT)  # a suspended process could not end
