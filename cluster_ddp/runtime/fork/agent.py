"""Watches the ranks that this process has forked: passes signals on, and ends all ranks when one fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.contract import EXIT_STOPPED
from cluster_ddp.processes import catches
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.failure import failure_marker
from cluster_ddp.runtime.safe_print import complain
from cluster_ddp.runtime.usage import cgroups

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to each rank once it has a handler: without one they would kill it."""

SIGNALS = (*WARNINGS, signal.SIGTERM, signal.SIGCHLD)
"""The signals that the agent waits for."""

PATIENCE_S = 30.0
"""Seconds from the first rank that stopped in time to TERM for the others, and from TERM to KILL: time to save."""

_POLL_S = 0.2  # while a deadline is set, or a warning waits for a rank's handler


class Agent:
    """Watches ranks.

    Args:
        ranks: process id -> rank. `SIGNALS` must have been blocked before the fork.
        env: an environment, such as os.environ, which may name the stop marker.
        early: `WARNINGS` that came before the fork.
    """

    def __init__(self, ranks: Mapping[int, int], env: Mapping[str, str], early: Sequence[int] = ()) -> None:
        self._running, self._env = dict(ranks), env
        self._statuses: list[int] = []  # other than 0, in the order in which the ranks ended
        self._waiting: set[tuple[int, signal.Signals]] = set()  # a process, and a warning for it
        self._term_at = self._kill_at = float("inf")  # on the clock of time.monotonic()
        self._ending = False  # whether TERM was sent
        self._oom_kills = cgroups.oom_kills()
        for number in early:
            self._pass_on(signal.Signals(number))

    def watch(self) -> int:
        """Wait for the end of all ranks.

        Returns:
            0 if all ranks ended with 0; else the `outcome` of the others' statuses: 75 for a rank that stopped in time,
            128 + n for one that signal n ended.
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
            stop_signals.write_stop_marker(
                self._env
            )  # srun reports only the highest status, which may be another node's
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
            host, is_oom = socket.gethostname(), cgroups.oom_kills() != self._oom_kills
            failure_marker.note_status(self._env, rank, host, status, is_oom=is_oom)
            self._say(f"rank {rank} {_words(status)}.")
            if is_oom:
                self._say(f"The kernel has killed a process of rank {rank} on {host} for memory (oom_kill).")

    def _end_overdue(self) -> None:
        """Send TERM, and later KILL, to the ranks that still run, when that is due."""
        now = time.monotonic()
        if now >= self._term_at and self._running:
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a suspended process could not end
            self._term_at, self._kill_at, self._ending = float("inf"), now + PATIENCE_S, True
        elif now >= self._kill_at and self._running:
            self._say(f"ranks {sorted(self._running.values())} did not end within {PATIENCE_S:g} s: killing them.")
            self._send(signal.SIGKILL)
            self._kill_at = float("inf")

    def _send(self, number: signal.Signals) -> None:
        for pid in self._running:  # not reaped yet: the ids are still theirs
            os.kill(pid, number)

    def _say(self, text: str) -> None:
        complain(f"[{socket.gethostname()}] {text}")


def outcome(statuses: list[int]) -> int:
    """Return the exit status for all ranks of a node.

    Args:
        statuses: the statuses other than 0, in the order in which the ranks ended.

    Returns:
        The first one that TERM did not cause, since TERM came from outside or from the agent; else the first, or 0.
    """
    ended = 128 + signal.SIGTERM
    return next((status for status in statuses if status != ended), statuses[0] if statuses else 0)


def _words(status: int) -> str:
    if status > 128 and status - 128 in set(signal.Signals):
        return f"was ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"
