"""Writes files in a thread, so that a file system that hangs does not stop the training. Slow writes are logged.

When a training ends, `settle` waits for files that are not on disk yet, and tries failed writes again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster_ddp.errors import RunDirError
from cluster_ddp.run.names import File
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.failure import last_progress

if TYPE_CHECKING:
    from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

PATIENCE_S = 600.0
"""Seconds that a training waits for its files after its end or stop; what is not written by then is lost."""
# When a slow write is first logged; then each time after twice as long.
_SLOW_S = 10.0
# At the end: how long one try may take, how often failed writes are tried again, and how often that is logged.
_TRY_S = 5.0
_EVERY_S = 5.0
_TELL_EVERY_S = 60.0


class BackgroundWriter:
    """A thread that makes one write after another, and knows when the current one began."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)  # Python waits for it at exit
        self._last: Future[None] | None = None
        self._path, self._since = Path(), 0.0
        self._told_s = _SLOW_S
        process_exit.before_now(self.wait)

    def begin(self, path: Path, write: Callable[[], None]) -> None:
        """Call a function in the thread, after the earlier ones. It writes the file, which messages name."""
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


class Files(Protocol):
    """Files that this rank writes in the background."""

    writer: BackgroundWriter

    def finish(self, timeout_s: float) -> str | None:
        """Write what is left, wait `timeout_s` seconds at most, and return what is not on disk then, or None."""


_files: list[Files] = []


def forget() -> None:
    """Forget the files of an earlier training in this process: one that failed has left them."""
    _files.clear()


def expect(files: Files) -> None:
    """Let `settle` wait for these files."""
    _files.append(files)


def are_stuck() -> bool:
    """Return whether a write that was given up still blocks: Python would wait for it at exit."""
    return any(files.writer.is_stuck() for files in _files)


def settle(world: World, *, together: bool = True) -> None:
    """Wait until all files are on disk. A collective, unless the process group has ended (`together`).

    Rank 0 knows whether they are. The others try again what they failed to write: rank 0 may wait for that.

    Raises:
        RunDirError: on rank 0, if `PATIENCE_S` seconds were not enough, or another job has taken the run directory.
        CheckpointError: on rank 0, if the last state can't be saved at all.
    """
    deadline = time.monotonic() + PATIENCE_S
    tell_at = 0.0
    on_all_ranks: Callable[[str], str] = world.broadcast if together else str
    while missing := on_all_ranks("; ".join(filter(None, [files.finish(_TRY_S) for files in _files]))):
        now = time.monotonic()
        decides = world.is_main or not together
        if decides and (now > deadline or are_stuck()):
            raise RunDirError(
                "Writing what is left at the end of the training:",
                f"{missing}. Retries for {PATIENCE_S:.0f} s failed; it is lost.",
                "fix that (df -h, quota), then start the training again in the same run directory: it resumes from the "
                "last good checkpoint",
            )
        if world.is_main and now > tell_at:
            tell_at = now + _TELL_EVERY_S
            log.error("The training has ended, but: %s. Trying again, for %.0f s at most.", missing, deadline - now)
            _note_until(time.time() + deadline - now)
        time.sleep(_EVERY_S)
    if tell_at:
        _note_until(time.time())
    _files.clear()


def _note_until(end_s: float) -> None:
    """Let the lock file say until when this rank waits: on a full disk, times can still be changed.

    In a thread, since the file system may hang.
    """

    def note(lock: Path) -> None:
        with suppress(OSError):
            os.utime(lock, (end_s, end_s))

    if last_progress.run_dir is not None:
        threading.Thread(target=note, args=(last_progress.run_dir / File.LOCK,), daemon=True).start()
