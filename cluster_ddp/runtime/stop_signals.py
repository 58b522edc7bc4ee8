"""Stopping in time: before the time limit, at preemption, at scancel.

A signal handler only sets a flag. Without a signal, the end of the job's time sets it. All ranks then agree on the step
to stop after (`checkpoint.stop_agreement` does both). Imports no torch: a signal may come while a training starts.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeGuard

from cluster_ddp import processes
from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.run.names import EXIT_STOPPED
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

DEFAULT_SIGNALS = ("USR1", "USR2", "TERM")
"""Signals before the time limit (sbatch --signal; USR2 is submitit's default), at preemption and scancel."""

WARNINGS = ("USR1", "USR2")
"""The signals that come some time before the end, and by themselves should not end a process."""

# How often to look for handlers of others: each look takes 10 us, and a step of a small model 1 ms.
_LOOK_EVERY_S = 0.5


class Stopped(SystemExit):
    """Ends a process that was stopped in time and can resume, with status `names.EXIT_STOPPED`. Not an error."""

    code: int

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


_early: list[int] = []  # signals that came before there was a StopFlag


def note_early(signals: Sequence[str]) -> None:
    """Record warnings that come while a training starts: it then stops after its first step, instead of being killed.

    TERM still ends the process, since there is nothing to save yet. Has no effect outside the main thread, or on a
    signal that has a handler. The errors are those of `number_of`.
    """
    for number in map(number_of, signals):
        has_none = number != signal.SIGTERM and signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN)
        if has_none and threading.current_thread() is threading.main_thread():
            signal.signal(number, _note_early)


def _note_early(number: int, frame: FrameType | None) -> None:
    _early.append(number)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block `DEFAULT_SIGNALS` in this thread, and in the processes that it starts, during the body."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, map(number_of, DEFAULT_SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopFlag:
    """Whether this rank was told to stop. Make it in the main thread: it installs signal handlers.

    A handler that is installed later, by the script or a library, is called as well: it does not replace ours. That is
    logged if `told`.

    Raises:
        SpecError: a signal does not exist or can't be handled.
        ValueError: this is not the main thread (signal.signal).
    """

    def __init__(self, signals: Sequence[str], *, told: bool = True) -> None:
        self._deadline, self._is_late = float("inf"), False
        self._suspensions, self._noting = processes.Suspensions(), threading.Lock()
        numbers = dict.fromkeys(map(number_of, signals))
        self._signal: int | None = None
        self._told, self._look_at_s = set[int]() if told else set(numbers), 0.0
        self.is_over = threading.Event()
        """Set when the training has ended or stops, and nothing needs to stop it any more."""
        self._before = {number: signal.signal(number, _Handler(self)) for number in numbers}
        self._signal = next((number for number in _early if number in numbers), self._signal)
        _early.clear()

    def stop_at(self, deadline: float) -> None:
        """Also stop at a time, on the clock of time.monotonic(), instead of the one given before.

        Call `note_suspension` every second or two from then on.
        """
        with self._noting:
            self._suspensions.missed_s()  # what was missed before is over
            self._deadline = deadline

    def note_suspension(self) -> None:
        """If this process was suspended, stop so much later: Slurm moves the end of the job, too."""
        with self._noting:
            self._deadline += self._suspensions.missed_s()

    def reason(self) -> str | None:
        """Return why to stop, None to continue. Once there is a reason, there always is."""
        self._come_first()
        if self._signal is not None:
            return f"{node_name(os.environ)} got {signal.Signals(self._signal).name.removeprefix('SIG')}"
        self.note_suspension()  # before a thread does
        self._is_late = self._is_late or time.monotonic() >= self._deadline
        if self._is_late:
            return "the job's time is nearly up"
        return None

    def is_set(self) -> bool:
        """Return whether to stop."""
        return self.reason() is not None

    def ignore(self) -> None:
        """Ignore the signals until the process has ended.

        When the first rank ends with a status other than 0, srun (--kill-on-bad-exit) sends TERM to the others. Python
        removes its handlers while it ends: the signal would then kill it, with status 143.
        """
        self.is_over.set()
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        """Restore the handlers of others; but ignore warnings that would end the process.

        After the training there is nothing left to save. Python removes its handlers while it ends: a warning that
        comes then would kill it.
        """
        self.is_over.set()
        for number, before in self._before.items():
            now = signal.getsignal(number)
            if not self._is_own(now):
                before = now  # installed since we looked last
            elif now.later is not None:
                before = now.later
            is_deadly_warning = number != signal.SIGTERM and before in (None, signal.SIG_DFL, _note_early)
            signal.signal(number, signal.SIG_IGN if is_deadly_warning else before or signal.SIG_DFL)
        self._before = {}

    def note(self, number: int) -> None:
        """Stop for this signal."""
        self._signal = number

    def _is_own(self, handler: object) -> TypeGuard[_Handler]:
        return isinstance(handler, _Handler) and handler.flag is self

    def _come_first(self) -> None:
        """Put our handlers before those that were installed after them, and say so once."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if time.monotonic() < self._look_at_s or self.is_over.is_set() or not is_main_thread:
            return
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        for number in self._before:
            if self._is_own(later := signal.getsignal(number)):  # perhaps the one before, which was put back
                continue
            if number not in self._told and not isinstance(later, _Handler):  # of another Checkpointer
                self._told.add(number)
                log.warning(
                    "Signal %s has another handler since the Checkpointer was made: %s. The training still stops at "
                    "it, and the handler is called. Hint: to stop at other signals only: Checkpointer(stop_signals=…)",
                    *(signal.Signals(number).name.removeprefix("SIG"), getattr(later, "__qualname__", later)),
                )
            signal.signal(number, _Handler(self, later))


class _Handler:
    """Sets a flag, and calls the handler that was installed after that flag's own."""

    def __init__(self, flag: StopFlag, later: Callable[[int, FrameType | None], object] | int | None = None) -> None:
        self.flag, self.later = flag, later

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.flag.note(number)
        later, self.later = self.later, None  # it may call the handler that it has replaced, even this one
        try:
            if callable(later):
                later(number, frame)
        finally:
            self.later = later


def number_of(name: str) -> signal.Signals:
    """Return the number of a signal that can stop a training, by its name in any case; SIG may be left out.

    Raises:
        SpecError: there is no such signal, or it can't be handled.
    """
    legal = sorted({one.name.removeprefix("SIG") for one in signal.Signals} - {"KILL", "STOP"})
    short = name.upper().removeprefix("SIG")
    if short not in legal:
        raise SpecError(
            f"Stopping at the signal {name!r}:",
            f"there is no such signal that can be handled.{nearest(short, legal)}",
            f"stop_signals={DEFAULT_SIGNALS} (of cluster-ddp train: --stop-signals)",
        )
    return signal.Signals[f"SIG{short}"]
