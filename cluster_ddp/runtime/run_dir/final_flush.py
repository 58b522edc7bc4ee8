"""When a training ends: wait for files that are not on disk yet, try failed writes again, and report what is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster_ddp.errors import RunDirError
from cluster_ddp.protocol import File
from cluster_ddp.runtime.failure import step_clock
from cluster_ddp.runtime.run_dir import background_writer

if TYPE_CHECKING:
    from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

_EVERY_S = 5.0
_TELL_EVERY_S = 60.0


class Files(Protocol):
    """Files that rank 0 writes in the background."""

    def finish(self, timeout_s: float) -> str | None:
        """Write what is left, wait `timeout_s` seconds at most, and return what is not on disk then, or None."""

    def is_stuck(self) -> bool:
        """Return whether a write takes so long that it is given up."""


_files: list[Files] = []


def forget() -> None:
    """Forget the files of an earlier training in this process: one that failed has left them."""
    _files.clear()


def expect(files: Files) -> None:
    """Let `settle` wait for these files."""
    _files.append(files)


def are_stuck() -> bool:
    """Return whether a write that was given up still blocks: Python would wait for it at exit."""
    return any(files.is_stuck() for files in _files)


def settle(world: World, *, together: bool = True) -> None:
    """Wait until all files of rank 0 are on disk. A collective.

    Args:
        world: all ranks.
        together: False lets the other ranks leave: the process group, over which they wait for rank 0, has ended.

    Raises:
        RunDirError: on rank 0, if `background_writer.PATIENCE_S` seconds were not enough, or another job has taken the
            run directory.
        CheckpointError: on rank 0, if the last state can't be saved at all.
    """
    deadline = time.monotonic() + background_writer.PATIENCE_S
    tell_at = 0.0
    on_all_ranks: Callable[[str], str] = world.broadcast if together else str
    while on_all_ranks(missing := _missing() if world.is_main else ""):
        if world.is_main:
            now = time.monotonic()
            if now > deadline or are_stuck():
                raise _lost(missing)
            if now > tell_at:
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

    if step_clock.run_dir is not None:
        threading.Thread(target=note, args=(step_clock.run_dir / File.LOCK,), daemon=True).start()


def _missing() -> str:
    """What is not on disk after another try, in words; "" if everything is."""
    return "; ".join(filter(None, [files.finish(_EVERY_S) for files in _files]))


def _lost(missing: str) -> RunDirError:
    return RunDirError(
        "Writing what is left at the end of the training:",
        f"{missing}. Retries for {background_writer.PATIENCE_S:.0f} s failed; it is lost.",
        "fix that (df -h, quota), then start the training again in the same run directory: it resumes from the last "
        "good checkpoint",
    )
