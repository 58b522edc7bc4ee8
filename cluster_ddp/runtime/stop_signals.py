"""Stopping in time: before the time limit, at preemption, at scancel.

A signal's handler only sets a flag. The job's time limit sets it, too (`checkpoint.time_limit`), where no signal comes.
All ranks then agree on the step to stop after (`checkpoint.stop_agreement`). Imports no torch: a training may be told
while it starts.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from cluster_ddp.contract import EXIT_STOPPED, Env
from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.files import open_own

log = logging.getLogger("cluster_ddp")

DEFAULT_SIGNALS = ("USR1", "USR2", "TERM")
"""Before the time limit (sbatch --signal; USR2 is submitit's own choice), at preemption and scancel."""

WARNINGS = ("USR1", "USR2")
"""Those of them that leave time, and that a process need not die of."""


class Stopped(SystemExit):
    """Ends the process, after everything was saved, with `contract.EXIT_STOPPED`. No error: nothing is reported."""

    code: int

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


_early: list[int] = []  # signals that came before there was a StopFlag


def note_early(signals: Sequence[str], *, instead_of: Sequence[object] | None = None) -> None:
    """Keep warnings that come while a training starts: it then stops after its first step, instead of dying of them.

    TERM still ends the process: nothing is to be saved yet. Only the main thread can do this; others do nothing.

    Args:
        signals: names without SIG.
        instead_of: the handlers that are replaced, such as signal.SIG_DFL; None for whatever is there.

    Raises:
        SpecError: a signal that there is not, or that can't be handled.
    """
    for number in dict.fromkeys(map(number_of, signals)):
        replaced = instead_of is None or signal.getsignal(number) in instead_of
        if number != signal.SIGTERM and replaced and threading.current_thread() is threading.main_thread():
            signal.signal(number, _note_early)


def _note_early(number: int, frame: FrameType | None) -> None:
    _early.append(number)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Hold them back from this thread, and from the processes that it starts, for the time of the body."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, default_numbers())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def default_numbers() -> list[signal.Signals]:
    """The numbers of `DEFAULT_SIGNALS`."""
    return [signal.Signals[f"SIG{name}"] for name in DEFAULT_SIGNALS]


class StopFlag:
    """Whether this rank was told to stop.

    Args:
        signals: names without SIG.

    Raises:
        SpecError: a signal that there is not, or that can't be handled.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self._deadline = float("inf")
        numbers = dict.fromkeys(map(number_of, signals))
        self._signal: int | None = None
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        self._signal = next((number for number in _early if number in numbers), self._signal)
        _early.clear()

    def stop_at(self, deadline: float) -> None:
        """Stop by the clock, too: at a time as time.monotonic() counts."""
        self._deadline = deadline

    def reason(self) -> str | None:
        """Why to stop; None to continue."""
        if self._signal is not None:
            return f"{socket.gethostname()} got {signal.Signals(self._signal).name.removeprefix('SIG')}"
        if time.monotonic() >= self._deadline:
            return "the job's time is nearly up"
        return None

    def is_set(self) -> bool:
        """Whether to stop."""
        return self.reason() is not None

    def ignore(self) -> None:
        """From now on let the signals do nothing, to the very end of the process.

        The first rank to end with another status than 0 makes srun (--kill-on-bad-exit) send TERM to the others. Python
        would forget a handler while it ends, and die of the signal: the status would be 143.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        """Let the signals do what they did before; but warnings that would end the process are ignored.

        The training has ended: whoever warns it has nothing left to save, and Python, which forgets handlers while it
        ends, would die of a warning that comes just then.
        """
        for number, before in self._before.items():
            is_deadly_warning = number != signal.SIGTERM and before in (None, signal.SIG_DFL, _note_early)
            signal.signal(number, signal.SIG_IGN if is_deadly_warning else before or signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def write_stop_marker(env: Mapping[str, str]) -> None:
    """Tell the batch script that the job was stopped in time: not every launcher passes an exit status on."""
    if path := env.get(Env.STOPPED):
        try:
            os.close(open_own(Path(path), os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            log.warning("Can't write the stop marker %s: %s.", path, error.strerror)


def number_of(name: str) -> signal.Signals:
    """The number of a signal that can stop a training.

    Raises:
        SpecError: there is no such signal, or it can't be handled.
    """
    legal = sorted({one.name.removeprefix("SIG") for one in signal.Signals} - {"KILL", "STOP"})
    short = name.upper().removeprefix("SIG")
    if short not in legal:
        raise SpecError(
            f"Stopping at the signal {name!r}:",
            f"there is no such signal that can be handled.{nearest(short, legal)}",
            f"--stop-signals {' '.join(DEFAULT_SIGNALS)}",
        )
    return signal.Signals[f"SIG{short}"]
