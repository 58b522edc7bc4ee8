"""The one supervisor of processes: it starts commands, passes signals on, ends all when one fails, reports each end.

A task's agent keeps its ranks, a job on this machine the agents of its tasks, a job of Slurm its srun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.rank_notes import FailureNote, Notes
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.signals import PendingSignals
from cluster_ddp.agent.supervision.spawn import spawn
from cluster_ddp.run.names import EXIT_STOPPED, Env
from cluster_ddp.slurm.variables import node_name

PATIENCE_S = 30.0
"""Seconds from the first rank that stopped in time to TERM for the others, and from TERM to KILL (Slurm's KillWait)."""

# Seconds from a rank's end to TERM for the others, by its status: other ranks save as well, or say where one was that
# gloo has aborted (they have lost their connection to it).
_UNTIL_TERM_S = {EXIT_STOPPED: PATIENCE_S, 128 + signal.SIGABRT: 10.0}

# Slurm may signal all processes of a step (proctrack/linuxproc, pgid), or only the first one of each task (cgroup). If
# a command still runs so many seconds later, the signal is passed on.
_PASS_ON_S = 1.0
_LONGEST_WAIT_S, _ENDING_WAIT_S = 3600.0, 2.0
_NEVER = float("inf")


class Supervisor:
    """Keeps commands. Once it is made, it holds the signals that this process gets, and passes them on in `wait`.

    Args:
        notes: where the ranks leave what they have to say.
        ended: is told of each end, in the order in which they come.
        patience_s: seconds from TERM to KILL.
        held: the signals that it passes on.
        on_term: is called instead of passing TERM on.
        takers: says which processes get a signal other than TERM for a command; none: not yet.
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
        self._notes, self._tell, self._patience_s, self._on_term = notes, ended, patience_s, on_term
        self._running: dict[int, int | None] = {}  # process id -> rank
        self._statuses: list[int] = []  # other than 0, in the order in which they came
        self._pending = PendingSignals(takers, self._say_it_waits)
        self._early: list[signal.Signals] = []  # came while commands were started
        self._term_at = self._kill_at = _NEVER  # on the clock of time.monotonic()
        self._suspensions, self._is_ending = processes.Suspensions(), False
        self.has_killed = False
        """Whether a command had to be killed: what it has started may still run."""
        self.has_got_term = False
        """Whether this process has got TERM, which is passed on."""
        self.count_oom_kills()
        # Whom nohup has started, a terminal that closes does not end, and none of its commands.
        deaf = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []
        self._held = [*(one for one in held if one not in deaf), signal.SIGCHLD]
        signals.hold(self._held)
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
        """Start a command. Returns its process id.

        Args:
            rank: its rank; None for srun, which stands for all.
            command, env, log: see `spawn`, also for errors.
            ignore_warnings: start it with USR1 and USR2 ignored, until it has a handler.
        """
        ignored = signals.WARNINGS if ignore_warnings else ()
        self._early += signals.taken(ignored)
        pid = spawn(command, env, log=log, default=self._held, ignored=ignored)
        self.adopt(rank, pid)
        return pid

    def adopt(self, rank: int | None, pid: int) -> None:
        """Keep a child of this process that is running already."""
        self._running[pid] = rank

    def count_oom_kills(self) -> None:
        """Leave out, in what is said of later ends, whom the kernel has killed for memory so far."""
        self._oom_kills = processes.oom_kills()

    @property
    def is_running(self) -> bool:
        """Whether a command runs."""
        return bool(self._running)

    def wait(self, tick: Callable[[], float] | None = None, *, until: Callable[[], bool] | None = None) -> int:
        """Wait for the end of all commands. Returns the `status_of` those that have ended.

        Args:
            tick: is called after each event. It returns after how many seconds it is to be called at the latest.
            until: is asked after each event whether to wait no longer.
        """
        while self._early:
            self.pass_on(self._early.pop(0))
        self._reap()
        while self._running and not (until is not None and until()):
            wait_s = _LONGEST_WAIT_S if tick is None else tick()
            due = min(self._term_at, self._kill_at, self._pending.due)
            wait_s = min(wait_s, due - time.monotonic(), _LONGEST_WAIT_S if due == _NEVER else _ENDING_WAIT_S)
            received = signals.wait(self._held, max(0.0, min(wait_s, _LONGEST_WAIT_S)))
            missed_s = self._suspensions.missed_s(_ENDING_WAIT_S)
            self._term_at, self._kill_at = self._term_at + missed_s, self._kill_at + missed_s
            if received is not None and not signals.is_known_to_all(received):
                self.pass_on(signal.Signals(received.si_signo))
            self._reap()
            self._pending.deliver(self._running)
            self._end_overdue()
        return status_of(self._statuses)

    def pass_on(self, number: signal.Signals) -> None:
        """Pass a signal on to all commands: to those that Slurm may have told, too, in a second."""
        if number == signal.SIGTERM and self._on_term is not None:
            self._on_term()
            return
        self.has_got_term |= number == signal.SIGTERM
        # Of an agent around it, Slurm has told that one, which has waited.
        is_first = "SLURM_PROCID" in os.environ and Env.NOTES not in os.environ
        self._pending.add(self._running, number, wait_s=_PASS_ON_S if is_first else 0.0)

    def end(self) -> None:
        """End all commands: TERM, later KILL."""
        if not self._is_ending:
            self._term_at = 0.0

    def kill(self) -> None:
        """Kill all commands, and wait for their ends. A wait in the kernel takes its time."""
        self._is_ending = True
        for pid in self._running:
            signals.send(pid, signal.SIGKILL)
        self.wait()

    def _say_it_waits(self, pid: int, number: signal.Signals) -> None:
        if self._running.get(pid, 1) in (0, None):  # for all ranks
            say(f"{number.name}: the command has no handler for it, and would die of it. It still waits for one.")

    def _reap(self) -> None:
        for pid in list(self._running):  # not any child: a thread may wait for one of its own
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(wait_status))

    def _ended(self, rank: int | None, code: int) -> None:
        status = code if code >= 0 else 128 - code
        if rank is not None:
            self._say_how(rank, status)
        if status == 0:
            return
        self._statuses.append(status)
        if not self._is_ending:
            wait_s = _UNTIL_TERM_S.get(status, 0.0)
            self._term_at = min(self._term_at, time.monotonic() + wait_s)

    def _say_how(self, rank: int, status: int) -> None:
        note = self._notes.failure(rank) or FailureNote("")
        is_oom = status not in (0, EXIT_STOPPED, 128 + signal.SIGTERM) and processes.oom_kills() != self._oom_kills
        was_stopped = status == EXIT_STOPPED or self._notes.is_stopped(rank)
        host = node_name(os.environ)
        self._tell(End(rank, host, status, note.words, note.kind, is_oom, was_stopped, note.step, note.micro_batch))
        if is_oom:
            say(f"The kernel has killed a process of rank {rank} on {host} for memory (oom_kill).")

    def _end_overdue(self) -> None:
        """Send TERM, and later KILL, to the commands that still run, when that is due."""
        now = time.monotonic()
        if now >= self._term_at and self._running:
            self._pending.add(self._running, signal.SIGTERM)
            self._term_at, self._kill_at, self._is_ending = _NEVER, now + self._patience_s, True
        elif now >= self._kill_at and self._running:
            names = ", ".join(map(_name, self._running.values()))
            say(f"{names} did not end within {self._patience_s:g} s of TERM: killing.")
            for pid in self._running:  # not reaped yet: the ids are still theirs
                signals.send(pid, signal.SIGKILL)
            self._kill_at, self.has_killed = _NEVER, True


def _name(rank: int | None) -> str:
    return "srun" if rank is None else f"rank {rank}"


def status_of(statuses: Sequence[int]) -> int:
    """Return the exit status for several commands, by those other than 0 in the order in which the commands ended.

    It is the first one that TERM did not cause, since TERM comes from outside or from here; else the first, or 0.
    """
    ended = 128 + signal.SIGTERM
    return next((status for status in statuses if status != ended), statuses[0] if statuses else 0)


def wake() -> None:
    """Let a `wait` in the main thread look now at its `until` and `tick`. Call it in another thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)


def say(text: str) -> None:
    """Print a line to stderr, with this host. A full disk is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"[{node_name(os.environ)}] {text}\n".encode())
