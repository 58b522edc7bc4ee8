"""The checkpoints of one run: a folder of files, of which the newest are kept, written in the background.

Only rank 0 uses it, and only one run at a time: `RunDir` holds the run folder's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from cluster_ddp.errors import CheckpointError
from cluster_ddp.files import sync_folder
from cluster_ddp.runtime.checkpoint import file
from cluster_ddp.runtime.checkpoint.file import DamagedError

log = logging.getLogger("cluster_ddp")

NAME = "checkpoints"
"""Of the folder, in the run folder."""

_NAME = re.compile(r"step-(\d+)\.pt")


class CheckpointFolder:
    """Checkpoints by the number of their step.

    Args:
        path: made with the first checkpoint.
        keep: how many of the newest stay.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self.keep = path, keep
        self.last_good: Path | None = None
        """The newest one that is known to be whole."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # Python waits for it in the end
        self._running: Future[None] | None = None

    def files(self) -> list[Path]:
        """The checkpoints, newest first; also of a folder that is not there."""
        steps = {int(match[1]): path for path in self.path.glob("*.pt") if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def newest(self, *, set_aside: bool) -> tuple[Path, str] | None:
        """The newest whole checkpoint and its SHA-256; damaged ones are reported.

        Args:
            set_aside: rename the damaged ones to *.damaged.

        Raises:
            CheckpointError: one can't be read.
        """
        for path in self.files():
            try:
                digest = file.digest(path)
            except DamagedError as error:
                aside = path.with_name(f"{path.name}.damaged")
                if set_aside:
                    path.replace(aside)
                then = f"It is set aside as {aside.name}; the one before is used." if set_aside else ""
                log.warning("The checkpoint %s is damaged: %s. %s", path, error, then)
                continue
            except OSError as error:
                raise _unreadable(path, error) from error
            self.last_good = path
            return path, digest
        return None

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left half written."""
        for path in self.path.glob(".step-*.tmp"):
            path.unlink(missing_ok=True)

    def is_writing(self) -> bool:
        """Whether the last save is still under way."""
        return self._running is not None and not self._running.done()

    def save(self, step: int, state: Mapping[str, Any], *, first: Callable[[], None]) -> None:
        """Write a checkpoint in the background, after the one before; a failure is a warning.

        Args:
            step: its number.
            state: not changed until it is written.
            first: what must be on disk before it is.
        """
        self._running = self._thread.submit(self._write, step, state, first)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is written, or has failed; whether that came within `timeout_s` seconds."""
        if self._running is not None:
            wait([self._running], timeout_s)
        return not self.is_writing()

    def _write(self, step: int, state: Mapping[str, Any], first: Callable[[], None]) -> None:
        path = self.path / f"step-{step:08}.pt"
        try:
            if not self.path.is_dir():
                self.path.mkdir(parents=True)
                sync_folder(self.path.parent)
            first()
            file.write(path, state)
        except Exception as error:  # whatever it is, training is worth more than one checkpoint
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            last = f"the last good one is {self.last_good}" if self.last_good else "there is none yet"
            log.error("Saving the checkpoint %s failed: %s. Training goes on; %s.", path, words, last)
            return
        self.last_good = path
        if run_dir := os.environ.get("CLUSTER_DDP_RUN_DIR"):  # for the batch script: --requeue-on-failure
            with contextlib.suppress(OSError):
                Path(run_dir, ".progress").write_text(f"{path.name}\n")
        for old in self.files()[self.keep :]:
            with contextlib.suppress(OSError):
                old.unlink()


def step_of(path: Path) -> int:
    """The number of a checkpoint's step."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def begin_with(path: Path) -> tuple[Path, str]:
    """A checkpoint that was asked for: a file, a run folder, or its folder of checkpoints.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    asked = f"Beginning with --resume {path}:"
    hint = "name a checkpoint (…/checkpoints/step-00000120.pt) or a run folder, or leave --resume out"
    if path.is_file():
        try:
            return path, file.digest(path)
        except DamagedError as error:
            raise CheckpointError(asked, f"it is damaged: {error}.", hint) from error
        except OSError as error:
            raise _unreadable(path, error) from error
    folder = path / NAME if (path / NAME).is_dir() else path
    if newest := CheckpointFolder(folder, keep=1).newest(set_aside=False):
        return newest
    raise CheckpointError(
        asked, "there is no such file." if not path.is_dir() else "no whole checkpoint is in it.", hint
    )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    hint = "mend that, or move the file away: then the one before is used"
    return CheckpointError(f"Reading the checkpoint {path}:", f"{error.strerror or error}.", hint)
