"""The process that watches the ranks that it has forked: passes signals on, and ends all when one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.contract import EXIT_STOPPED
from cluster_ddp.processes import catches
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.output import complain

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to each rank as soon as it catches them: by default it would die of them."""

SIGNALS = (*WARNINGS, signal.SIGTERM, signal.SIGCHLD)
"""What the agent waits for."""

PATIENCE_S = 30.0
"""How long the others may run once a rank was stopped in time, and then once they were told to end: time to save."""

_POLL_S = 0.2  # while something is due, or a warning waits for a rank to catch it


class Agent:
    """Watches ranks.

    Args:
        ranks: process id -> rank. `SIGNALS` must have been blocked before they were forked.
        env: the environment, where the stop marker may be named.
        early: `WARNINGS` that came before the ranks were there.
    """

    def __init__(self, ranks: Mapping[int, int], env: Mapping[str, str], early: Sequence[int] = ()) -> None:
        self._running, self._env = dict(ranks), env
        self._statuses: list[int] = []  # of ranks that did not end with 0, in the order of their ends
        self._waiting: set[tuple[int, signal.Signals]] = set()  # warnings, and the process that does not catch them yet
        self._term_at = self._kill_at = float("inf")  # as time.monotonic() counts
        self._ending = False  # whether TERM was sent
        for number in early:
            self._pass_on(signal.Signals(number))

    def watch(self) -> int:
        """Wait for the end of all ranks.

        Returns:
            75 where they were stopped in time, else the status of the first that failed (128 + n where a signal ended
            it), else 0.
        """
        while self._running:
            is_busy = self._waiting or min(self._term_at, self._kill_at) < float("inf")
            received = signal.sigtimedwait(SIGNALS, _POLL_S if is_busy else 3600.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._pass_on(signal.Signals(received.si_signo))
            self._reap()
            self._warn()
            self._end_overdue()
        status = outcome(self._statuses)
        if status == EXIT_STOPPED:
            stop_signals.write_stop_marker(self._env)  # srun tells the highest status only, which may be another node's
        return status

    def _pass_on(self, number: signal.Signals) -> None:
        if number in WARNINGS:
            self._waiting |= {(pid, number) for pid in self._running}
        else:
            self._send(number)

    def _warn(self) -> None:
        for pid, number in list(self._waiting):
            if pid not in self._running:
                self._waiting.discard((pid, number))
            elif catches(pid, number):
                os.kill(pid, number)
                self._waiting.discard((pid, number))

    def _reap(self) -> None:
        while self._running:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(wait_status)
            if pid in self._running:
                self._ended(self._running.pop(pid), code if code >= 0 else 128 - code)

    def _ended(self, rank: int, status: int) -> None:
        if status == 0:
            return
        self._statuses.append(status)
        if self._ending:
            return
        if status == EXIT_STOPPED:
            self._term_at = min(self._term_at, time.monotonic() + PATIENCE_S)
        else:
            self._term_at = 0.0
            self._say(f"rank {rank} {_words(status)}.")

    def _end_overdue(self) -> None:
        """TERM, and some time later KILL, for those that are still there."""
        now = time.monotonic()
        if now >= self._term_at and self._running:
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # one that was stopped could not end
            self._term_at, self._kill_at, self._ending = float("inf"), now + PATIENCE_S, True
        elif now >= self._kill_at and self._running:
            self._say(f"ranks {sorted(self._running.values())} did not end within {PATIENCE_S:g} s: killing them.")
            self._send(signal.SIGKILL)
            self._kill_at = float("inf")

    def _send(self, number: signal.Signals) -> None:
        for pid in self._running:  # not waited for yet: the ids are still theirs
            os.kill(pid, number)

    def _say(self, text: str) -> None:
        complain(f"[{socket.gethostname()}] {text}")


def outcome(statuses: list[int]) -> int:
    """The status of a node's ranks.

    Args:
        statuses: those that are not 0, in the order in which they came.

    Returns:
        The first; one that TERM has caused, only if there is no other, since it came from outside or from the agent.
    """
    ended = 128 + signal.SIGTERM
    return next((status for status in statuses if status != ended), statuses[0] if statuses else 0)


def _words(status: int) -> str:
    if status > 128 and status - 128 in set(signal.Signals):
        return f"was ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
