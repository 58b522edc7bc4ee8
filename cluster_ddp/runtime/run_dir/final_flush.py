"""What is not on disk yet when a training ends: waited for, tried again, and named where it is lost."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from cluster_ddp.errors import RunDirError
from cluster_ddp.runtime.run_dir import background_writer

if TYPE_CHECKING:
    from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

_EVERY_S = 5.0
_TELL_EVERY_S = 60.0


class Files(Protocol):
    """What rank 0 writes in the background."""

    def finish(self, timeout_s: float) -> str | None:
        """Write what is left, wait for it, and tell what is not on disk by then."""

    def is_stuck(self) -> bool:
        """Whether a write takes so long that it is given up."""


_files: list[Files] = []


def expect(files: Files) -> None:
    """Let the world not be left before these files are on disk."""
    _files.append(files)


def are_stuck() -> bool:
    """Whether a write is given up that still blocks: Python would wait for it in the end."""
    return any(files.is_stuck() for files in _files)


def settle(world: World) -> None:
    """Wait until rank 0 has all on disk. A collective.

    Raises:
        RunDirError: on rank 0, when `background_writer.PATIENCE_S` seconds were not enough.
    """
    deadline = time.monotonic() + background_writer.PATIENCE_S
    tell_at = 0.0
    while world.broadcast(missing := _missing() if world.is_main else ""):
        if world.is_main:
            now = time.monotonic()
            if now > deadline or are_stuck():
                raise _lost(missing)
            if now > tell_at:
                tell_at = now + _TELL_EVERY_S
                log.error("The training has ended, but: %s. Trying again, for %.0f s at most.", missing, deadline - now)
            time.sleep(_EVERY_S)
    _files.clear()


def _missing() -> str:
    """What is not on disk after another try, in words; "" if all is."""
    return "; ".join(filter(None, [files.finish(_EVERY_S) for files in _files]))


def _lost(missing: str) -> RunDirError:
    return RunDirError(
        "Writing what is left at the end of the training:",
        f"{missing}. It was tried for {background_writer.PATIENCE_S:.0f} s, and is lost.",
        "mend that (df -h, quota), then start the training again in the same run directory: it resumes from the last "
        "good checkpoint",
    )
