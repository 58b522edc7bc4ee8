"""Writes files in a thread, so that a file system that hangs does not stop the training. Slow writes are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

log = logging.getLogger("cluster_ddp")

PATIENCE_S = 600.0
"""Seconds that a training waits for its files after its end or stop; what is not written by then is lost."""
# When a slow write is first logged; then each time after twice as long.
_SLOW_S = 10.0


class BackgroundWriter:
    """A thread that makes one write after another, and knows when the current one began."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)  # Python waits for it at exit
        self._last: Future[None] | None = None
        self._path, self._since = Path(), 0.0
        self._told_s = _SLOW_S

    def begin(self, path: Path, write: Callable[[], None]) -> None:
        """Call a function in the thread, after the earlier ones.

        Args:
            path: the file that it writes, for messages.
            write: the function.
        """
        if not self._is_running():
            self._path, self._since = path, time.monotonic()
        self._last = self._thread.submit(self._run, path, write)

    def check(self) -> None:
        """Raise the exception of the last write, if it has ended with one."""
        if self._last is not None and self._last.done():
            self._last.result()

    def is_busy(self) -> bool:
        """Return whether a write is running or queued. Raises as `check` does."""
        self.check()
        return self._is_running()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all writes have ended; return False after `timeout_s` seconds. Raises as `check` does."""
        if self._last is not None:
            wait([self._last], timeout_s)
        return not self.is_busy()

    def is_stuck(self) -> bool:
        """Return whether the current write has taken more than `PATIENCE_S` seconds: then it is given up."""
        return self._is_running() and self._busy_s() > PATIENCE_S

    def at_work(self) -> str:
        """Return what is being written, and for how long, in words."""
        return f"{self._path}, for {self._busy_s():.0f} s"

    def tell_if_slow(self) -> None:
        """Log the current write if it is slow, at growing intervals."""
        if self._is_running() and self._busy_s() > self._told_s:
            self._told_s = 2 * self._busy_s()
            log.warning("Still being written: %s. Does its file system hang?", self.at_work())

    def _is_running(self) -> bool:
        return self._last is not None and not self._last.done()

    def _busy_s(self) -> float:
        return time.monotonic() - self._since

    def _run(self, path: Path, write: Callable[[], None]) -> None:
        self._path, self._since = path, time.monotonic()
        try:
            write()
        finally:
            if self._told_s > _SLOW_S:
                log.warning("Writing %s took %.0f s.", path, self._busy_s())
            self._told_s = _SLOW_S
