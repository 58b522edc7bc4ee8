"""The checkpoints of one run: a folder of files, written in the background; the newest are kept.

Only rank 0 uses it, and only one run at a time: `RunDir` holds the run directory's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.contract import Env, File
from cluster_ddp.errors import CheckpointError, RunDirError
from cluster_ddp.files import atomic_write, make_dir, remove_leftovers, reserve_descriptors, sync_folder, with_reserve
from cluster_ddp.runtime.checkpoint import file
from cluster_ddp.runtime.checkpoint.file import DamagedError
from cluster_ddp.runtime.run_dir.background_writer import BackgroundWriter

log = logging.getLogger("cluster_ddp")

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
        self.writer = BackgroundWriter("checkpoint")
        file.import_all()
        self._failure = ""
        self._again: Callable[[], None] | None = None
        self._has_ended = False  # the training: what fails again is said by who asks for it

    def files(self) -> list[Path]:
        """The checkpoints, newest first; also of a folder that is not there."""
        found = with_reserve(lambda: list(self.path.glob("*.pt")))
        steps = {int(match[1]): path for path in found if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def newest(self, *, set_aside: bool, but: Container[Path] = ()) -> tuple[Path, str] | None:
        """The newest whole checkpoint and its SHA-256; damaged ones are reported.

        Args:
            set_aside: rename the damaged ones to *.damaged.
            but: those to pass over.

        Raises:
            CheckpointError: one can't be read.
        """
        for path in (path for path in self.files() if path not in but):
            try:
                digest = file.digest(path)
            except DamagedError as error:
                if set_aside:
                    put_aside(path, error)
                else:
                    log.warning("The checkpoint %s is damaged: %s.", path, error)
                continue
            except OSError as error:
                raise _unreadable(path, error) from error
            self.last_good = path
            return path, digest
        return None

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left half written."""
        remove_leftovers(self.path)

    def save(self, step: int, state: Mapping[str, Any], *, first: Callable[[], None]) -> None:
        """Write a checkpoint in the background, after the one before; a failure is a warning.

        Args:
            step: its number.
            state: not changed until it is written.
            first: what must be on disk before it is. Where it raises a RunDirError, so does `writer`.
        """
        path = self.path / f"step-{step:08}.pt"
        self._again = lambda: self.writer.begin(path, lambda: self._write(path, state, first))
        self._again()

    @property
    def has_failed(self) -> bool:
        """Whether there is something that could not be saved, and nothing after it has been."""
        return bool(self._failure)

    def note_failure(self, words: str) -> None:
        """Remember that there is something that could not be saved; nothing of what failed before is tried again."""
        self._failure, self._again = words, None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is written, or has failed; whether that came within `timeout_s` seconds."""
        return self.writer.wait(timeout_s)

    def finish(self, timeout_s: float) -> str | None:
        """Try again what was not saved at last.

        Args:
            timeout_s: seconds to wait for it.

        Returns:
            What is not on disk by then, in words; None if all is.

        Raises:
            CheckpointError: to try again is of no use.
        """
        if self._failure and not self.writer.is_busy():
            if self._again is None:
                raise CheckpointError("Saving the end of the training:", self._failure, "see the errors above")
            self._has_ended = True
            self._again()
        if not self.writer.wait(timeout_s):
            return f"still being written: {self.writer.at_work()}"
        return self._failure or None

    def is_stuck(self) -> bool:
        """Whether a save takes so long that it is given up."""
        return self.writer.is_stuck()

    def _write(self, path: Path, state: Mapping[str, Any], first: Callable[[], None]) -> None:
        try:
            first()
            if not self.path.is_dir():
                make_dir(self.path)
                sync_folder(self.path.parent)
            file.write(path, state)
        except RunDirError:
            raise
        except Exception as error:  # whatever it is, training is worth more than one checkpoint
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            last = f"the last good one is {self.last_good}" if self.last_good else "there is none yet"
            self._failure = f"{path} is not saved: {words}; {last}"
            if not self._has_ended:
                log.error("Saving the checkpoint %s failed: %s. Training continues; %s.", path, words, last)
            return
        self.last_good, self._failure = path, ""
        if run_dir := os.environ.get(Env.RUN_DIR):  # for the batch script: --requeue-on-failure
            with contextlib.suppress(OSError), atomic_write(Path(run_dir, File.PROGRESS)) as progress:
                progress.write(f"{path.name}\n".encode())
        with contextlib.suppress(OSError):
            for old in self.files()[self.keep :]:
                old.unlink()
        reserve_descriptors()


def put_aside(path: Path, error: DamagedError) -> None:
    """Rename a damaged checkpoint to *.damaged, and say so."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    words = "The checkpoint %s is damaged: %s. It is set aside as %s; the one before is used."
    log.warning(words, path, error, aside.name)


def step_of(path: Path) -> int:
    """The number of a checkpoint's step."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def begin_with(path: Path) -> tuple[Path, str]:
    """A checkpoint that was asked for: a file, a run directory, or its folder of checkpoints.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    asked = f"Beginning with --resume {path}:"
    hint = "name a checkpoint (…/checkpoints/step-00000120.pt) or a run directory, or leave --resume out"
    if path.is_file():
        try:
            return path, file.digest(path)
        except DamagedError as error:
            raise CheckpointError(asked, f"it is damaged: {error}.", hint) from error
        except OSError as error:
            raise _unreadable(path, error) from error
    folder = path / File.CHECKPOINTS if (path / File.CHECKPOINTS).is_dir() else path
    if newest := CheckpointFolder(folder, keep=1).newest(set_aside=False):
        return newest
    raise CheckpointError(
        asked, "there is no such file." if not path.is_dir() else "no whole checkpoint is in it.", hint
    )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    hint = "mend that, or move the file away: then the one before is used"
    return CheckpointError(f"Reading the checkpoint {path}:", f"{error.strerror or error}.", hint)
