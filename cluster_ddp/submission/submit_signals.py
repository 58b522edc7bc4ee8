"""INT (Ctrl-C), HUP (a closed terminal) and TERM during a submission, which must be complete or undone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal arrived; the body must undo what it has done."""


class SubmitSignals:
    """Context manager: in its body, such a signal raises `Interrupted`; at its end, the signal has its usual effect.

    Ignored signals stay ignored (nohup). Outside the main thread nothing changes, since only it can set handlers.

    Raises:
        KeyboardInterrupt: a signal arrived, and the caller's own handler returned.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._is_late = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SubmitSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._came:
            signal.raise_signal(self._came[0])
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt from None  # a handler of the caller's own has returned

    @contextmanager
    def late(self) -> Iterator[None]:
        """Delay signals until the end of the body, so that it is completed. Then it raises `Interrupted`."""
        came, self._is_late = len(self._came), True
        try:
            yield
        finally:
            self._is_late = False
        if len(self._came) > came:
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if not self._is_late and len(self._came) == 1:
            raise Interrupted
