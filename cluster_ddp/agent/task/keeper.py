"""The one supervisor of processes: it starts commands, passes signals on, ends all when one fails, reports each end.

A task's agent keeps one command, `--launcher fork` the ranks that it has forked, a job on this machine all its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent.notes import Notes
from cluster_ddp.agent.outcome import End
from cluster_ddp.agent.task import memory, signals
from cluster_ddp.contract import EXIT_STOPPED
from cluster_ddp.files import open_own

PATIENCE_S = 30.0
"""Seconds from the first rank that stopped in time to TERM for the others, and from TERM to KILL (Slurm's KillWait)."""

# Slurm may signal all processes of a step (proctrack/linuxproc, pgid), or only the first one of each task (cgroup). If
# a command still runs so many seconds later, the signal is passed on.
_PASS_ON_S = 1.0
_POLL_S = 0.2  # while a deadline is set, or a warning waits for a handler
_NEVER = float("inf")


class Child(NamedTuple):
    """A command that runs."""

    rank: int | None
    """None for the parent of several ranks: torchrun's agent, a process that forks."""
    name: str
    """For messages, such as "rank 3"."""


class Keeper:
    """Keeps commands. From its making on, it holds the signals of this process, until it passes them on.

    Args:
        notes: where the ranks leave what they have to say.
        ended: is told of each end, in the order in which they come.
        patience_s: seconds from TERM to KILL.
        held: the signals that it passes on.
        on_term: is called instead of passing TERM on.
        takers: says which processes get a signal for a command; none: not yet. TERM is for the command itself.
    """

    def __init__(
        self,
        notes: Notes,
        ended: Callable[[End], None],
        *,
        patience_s: float = PATIENCE_S,
        held: Sequence[signal.Signals] = signals.PASSED_ON,
        on_term: Callable[[], None] | None = None,
        takers: Callable[[int, int], Sequence[int]] = signals.takers,
    ) -> None:
        self._takers = takers
        self._notes, self._tell, self._patience_s, self._on_term = notes, ended, patience_s, on_term
        self._running: dict[int, Child] = {}
        self._statuses: list[int] = []  # other than 0, in the order in which they came
        self._waiting: dict[tuple[int, signal.Signals], float] = {}  # a process and a signal for it: when to look
        self._term_at = self._kill_at = _NEVER  # on the clock of time.monotonic()
        self._is_ending = False
        self.has_killed = False
        """Whether a command had to be killed: what it has started may still run."""
        self._oom_kills = memory.oom_kills()
        self._held = [*held, signal.SIGCHLD]
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        for number in self._held:  # shows other processes, in /proc, that they are caught
            signal.signal(number, lambda number, frame: None)

    def start(
        self,
        rank: int | None,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Path | None = None,
        ignore_warnings: bool = False,
    ) -> int:
        """Start a command.

        Args:
            rank: its rank; None for the parent of several.
            command: program and arguments.
            env: its environment.
            log: where its output is appended; None for this process's own.
            ignore_warnings: start it with USR1 and USR2 ignored, until it has a handler.

        Returns:
            Its process id.

        Raises:
            OSError: the log can't be written, or there is no such program.
        """
        actions: list[Any] = [] if log is None else [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        target = None if log is None else open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        actions += [] if target is None else [(os.POSIX_SPAWN_DUP2, target, stream) for stream in (1, 2)]
        for number in signals.WARNINGS if ignore_warnings else ():
            signal.signal(number, signal.SIG_IGN)  # it is blocked: one that comes now is held nevertheless
        defaults = [number for number in self._held if not (ignore_warnings and number in signals.WARNINGS)]
        try:
            pid = os.posix_spawnp(
                command[0], list(command), dict(env), file_actions=actions, setsigmask=(), setsigdef=defaults
            )
        finally:
            for number in signals.WARNINGS if ignore_warnings else ():
                signal.signal(number, lambda number, frame: None)
            if target is not None:
                os.close(target)
        self.adopt(rank, pid)
        return pid

    def adopt(self, rank: int | None, pid: int) -> None:
        """Keep a child of this process that is running already."""
        self._running[pid] = Child(rank, "the ranks' parent" if rank is None else f"rank {rank}")

    def let_go(self, handlers: Mapping[int, Any]) -> None:
        """In a process that was forked: keep nothing, and let the signals come.

        Args:
            handlers: signal -> its handler; the default effect for the others.
        """
        for number in self._held:
            signal.signal(number, handlers.get(number, signal.SIG_DFL))
        self._running = {}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._held)

    @property
    def running(self) -> list[int]:
        """The process ids of the commands that run."""
        return list(self._running)

    def keep(self, tick: Callable[[], None] | None = None) -> int:
        """Wait for the end of all commands.

        Args:
            tick: is called after each event, and at least once a second.

        Returns:
            The `status_of` all.
        """
        while self._running:
            is_busy = self._waiting or min(self._term_at, self._kill_at) < _NEVER
            received = signal.sigtimedwait(self._held, _POLL_S if is_busy else 1.0 if tick else 3600.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self.received(signal.Signals(received.si_signo))
            self._reap()
            self._pass_on()
            self._end_overdue()
            if tick is not None:
                tick()
        return status_of(self._statuses)

    def received(self, number: signal.Signals) -> None:
        """Pass a signal on to all commands: to those that Slurm may have told, too, in a second."""
        if number == signal.SIGTERM and self._on_term is not None:
            self._on_term()
            return
        if number in (signal.SIGINT, signal.SIGQUIT) and signals.are_typed():
            return  # it has reached all
        due = time.monotonic() + (_PASS_ON_S if "SLURM_PROCID" in os.environ else 0.0)
        self._waiting.update({(pid, number): due for pid in self._running if (pid, number) not in self._waiting})

    def end(self) -> None:
        """End all commands: TERM, later KILL."""
        self._term_at = min(self._term_at, 0.0)

    def _pass_on(self) -> None:
        for (pid, number), due in list(self._waiting.items()):
            if pid not in self._running:
                del self._waiting[pid, number]
            elif time.monotonic() >= due:
                takers = [pid] if number == signal.SIGTERM else self._takers(pid, number)
                for one in takers:  # without any it waits: the command would die of it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, number)
                if takers:
                    del self._waiting[pid, number]

    def _reap(self) -> None:
        for pid in list(self._running):  # not any child: a thread may wait for one of its own
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(wait_status))

    def _ended(self, child: Child, code: int) -> None:
        status = code if code >= 0 else 128 - code
        if child.rank is None:  # it ends with a status of its own because of a rank
            words, is_consequence = "", code >= 0
        else:
            words, is_consequence = self._notes.failure(child.rank) or ("", False)
        is_oom = status not in (0, EXIT_STOPPED, 128 + signal.SIGTERM) and memory.oom_kills() != self._oom_kills
        was_stopped = status == EXIT_STOPPED or self._notes.is_stopped(child.rank)
        host = socket.gethostname()
        self._tell(End(child.rank, host, status, words, is_consequence, is_oom, was_stopped))
        if is_oom:
            say(f"The kernel has killed a process of {child.name} on {host} for memory (oom_kill).")
        if status == 0:
            return
        self._statuses.append(status)
        if not self._is_ending:
            wait_s = PATIENCE_S if status == EXIT_STOPPED else 0.0
            self._term_at = min(self._term_at, time.monotonic() + wait_s)

    def _end_overdue(self) -> None:
        """Send TERM, and later KILL, to the commands that still run, when that is due."""
        now = time.monotonic()
        if now >= self._term_at and self._running:
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a suspended process could not end
            self._term_at, self._kill_at, self._is_ending = _NEVER, now + self._patience_s, True
        elif now >= self._kill_at and self._running:
            names = ", ".join(child.name for child in self._running.values())
            say(f"{names} did not end within {self._patience_s:g} s of TERM: killing.")
            self._send(signal.SIGKILL)
            self._kill_at, self.has_killed = _NEVER, True

    def _send(self, number: signal.Signals) -> None:
        for pid in self._running:  # not reaped yet: the ids are still theirs
            os.kill(pid, number)


def status_of(statuses: Sequence[int]) -> int:
    """Return the exit status for several commands.

    Args:
        statuses: those other than 0, in the order in which the commands ended.

    Returns:
        The first one that TERM did not cause, since TERM came from outside or from the keeper; else the first, or 0.
    """
    ended = 128 + signal.SIGTERM
    return next((status for status in statuses if status != ended), statuses[0] if statuses else 0)


def say(text: str) -> None:
    """Print a line to stderr, with this host. A full disk is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"[{socket.gethostname()}] {text}\n".encode())
