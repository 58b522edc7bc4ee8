"""The folder of a run's checkpoints: written in the background; only the newest are kept.

One run at a time uses it: `RunDir` holds the lock. Rank 0 writes; of a sharded state each rank writes its pieces files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import CheckpointError, NonFiniteError, RunDirError
from cluster_ddp.run.files import ensure_dir, reserve_descriptors, sync_folder, with_reserve
from cluster_ddp.run.names import Env, File
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError, UnusableError
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.checkpoint.sharded.sharded_save import ShardedSave
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.runtime.run_dir.background_writer import BackgroundWriter
from cluster_ddp.runtime.run_dir.fenced_writes import atomic_write

log = logging.getLogger("cluster_ddp")

_NAME = re.compile(r"step-(\d+)\.pt")
REFUSED = "The checkpoint %s %s: %s."


class CheckpointFolder:
    """The newest `keep` checkpoints of a run, by step. The folder is made with the first one."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self.keep = path, keep
        self.last_good: Path | None = None
        """The newest checkpoint that is known to be undamaged."""
        self.writer = BackgroundWriter("checkpoint")
        checkpoint_file.import_all()
        self.bests: dict[str, tuple[float, int]] = {}
        """The best values so far, by name, each with its step; after a resume, as they were at its checkpoint."""
        self._in_files: dict[str, tuple[float, int]] = {}  # those of an earlier start, when they are first asked for
        self.failure = ""
        """Why the last save failed, in words; empty if it did not."""
        # The last write, and its path, which `finish` tries again if it has failed.
        self._last: tuple[Path, Callable[[], None]] | None = None
        self._has_ended = False  # the training: from then on `finish` reports failures, not `_write`

    def files(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first; none if the folder does not exist."""
        found = with_reserve(lambda: list(self.path.glob("*.pt")))
        steps = {int(match[1]): path for path in found if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def newest(
        self, check: Callable[[Path], object] = lambda path: None
    ) -> tuple[tuple[Path, str] | None, dict[Path, DamagedError]]:
        """Return the newest checkpoint that can be used, with its SHA-256, or None; and why newer ones can't be.

        `check` raises a DamagedError for one whose content can't be used. One that can't be read is a CheckpointError.
        """
        refused: dict[Path, DamagedError] = {}
        for path in self.files():
            try:
                digest = _checked(path, check, _check_name)
            except DamagedError as error:
                refused[path] = error
            else:
                self.last_good = path
                return (path, digest), refused
        return None, refused

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        first: Callable[[], object],
        sharded: ShardedSave | None = None,
        best: tuple[str, float] | None = None,
    ) -> None:
        """Write a checkpoint in the background, after the previous one. A failure is logged, not raised.

        The state must not change until it is written. `first` is called first, to write what must be on disk before. If
        it returns True, the state is left out. `writer` raises its RunDirError and NonFiniteError. A `best` one
        replaces the one before.
        """
        path, name, before = self.path / f"step-{step:08}.pt", None, None
        if best is not None:
            name, value = best
            before = self.bests.get(name)
            self.bests[name] = value, step
            path, state = self._best_path(name), {**state, "best": {name: value}, "bests": {**self.bests}}
        self._begin(path, functools.partial(self._carry_out, path, state, first, sharded, name, before))

    def best(self, name: str) -> float | None:
        """Return the value of the best checkpoint by that name; None without one. A damaged one is logged."""
        self._read_best(name)
        return self.bests[name][0] if name in self.bests else None

    def _read_best(self, name: str) -> int:
        """Read the file of an earlier start, once. Returns its step; -1 if it can't be used."""
        if name not in self._in_files:
            self._in_files[name] = math.nan, -1
            path = self._best_path(name)
            try:
                saved = checkpoint_file.read(path)
                self._in_files[name] = saved["best"][name], saved["position"]["steps"]
            except (DamagedError, KeyError, OSError) as error:
                self.bests.pop(name, None)
                if path.exists():
                    log.warning("The best checkpoint %s can't be used: %s. The next one replaces it.", path, error)
        return self._in_files[name][1]

    def is_best_again(self, name: str, value: float, step: int) -> bool:
        """Whether an earlier start has saved that checkpoint at this step, once: a resume runs the evaluation again."""
        is_again = self._in_files.get(name) == (value, step)
        if is_again:
            self.bests[name], self._in_files[name] = (value, step), (math.nan, -1)
        return is_again

    def resume(self, bests: Mapping[str, Sequence[Any]], checkpoint: Path, steps: int) -> list[str]:
        """Begin with the best values of a checkpoint of this folder, of so many steps. Returns what to say of files."""
        self.bests = {name: (value, step) for name, (value, step) in bests.items()}
        saved_s, said = checkpoint.stat().st_mtime, []
        for path in sorted(self.path.glob("best-*.pt")):
            is_newer = path.stat().st_mtime >= saved_s
            step = self._read_best(path.stem.removeprefix("best-")) if is_newer else -1
            if step > steps:
                said.append(f"{path.name} is of step {step}, which is trained again: do not load it before that")
        return said

    def note_failure(self, words: str) -> None:
        """Record in words that a state could not be saved, so that no earlier save is tried again."""
        self.failure, self._last = words, None

    def finish(self, timeout_s: float) -> str | None:
        """Try the last save again if it failed. Return in words what is not on disk after `timeout_s` seconds, or None.

        Raises:
            CheckpointError: the last state can't be saved at all.
        """
        if self.failure and not self.writer.is_busy():
            if self._last is None:
                raise CheckpointError("Saving the end of the training:", self.failure, "see the errors above")
            self._has_ended = True
            self._begin(*self._last)
        if not self.writer.wait(timeout_s):
            return f"still being written: {self.writer.at_work()}"
        return self.failure or None

    def _best_path(self, name: str) -> Path:
        return self.path / f"best-{name}.pt"

    def _begin(self, path: Path, write: Callable[[], None]) -> None:
        self._last = path, write
        self.writer.begin(path, write)

    def _carry_out(
        self,
        path: Path,
        state: Mapping[str, Any],
        first: Callable[[], object],
        sharded: ShardedSave | None,
        best: str | None,
        before: tuple[float, int] | None = None,
    ) -> None:
        """Write a checkpoint, in the background: one more step's, or the best one by that name, after another one."""
        is_written = self._write(path, state, first, sharded)
        if is_written and best is None:
            self._note_newest(path)
        if not is_written and best is not None:
            self.bests = {name: value for name, value in {**self.bests, best: before}.items() if value is not None}
        if not self.failure:
            self._last = None  # it refers to the state, and `first` to all that the training has
        reserve_descriptors()

    def _write(
        self, path: Path, state: Mapping[str, Any], first: Callable[[], object], sharded: ShardedSave | None
    ) -> bool:
        """Write a checkpoint, or this rank's part of it. Returns whether the checkpoint is written."""
        try:
            if first():
                self.failure = ""  # a retry would be left out, too
                return False
            if not self.path.is_dir():
                ensure_dir(self.path)
                sync_folder(self.path.parent)
            if sharded is None:
                checkpoint_file.write(path, state)
            is_written = sharded is None or sharded.write(path, state)
        except (RunDirError, NonFiniteError):
            raise
        except Exception as error:  # of any kind: training matters more than one checkpoint
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            last = f"the last good one is {self.last_good}" if self.last_good else "there is none yet"
            self.failure = f"{path} is not saved: {words}; {last}"
            if not self._has_ended and (sharded is None or sharded.is_main):  # the others tell rank 0
                then = last if sharded and sharded.is_last else f"Training continues; {last}"
                log.error("Saving the checkpoint %s failed: %s. %s.", path, words, then)
            return False
        self.failure = ""
        return is_written

    def _note_newest(self, path: Path) -> None:
        self.last_good = path
        if run_dir := os.environ.get(Env.RUN_DIR):  # for the job's agent: --restarts
            with contextlib.suppress(OSError), atomic_write(Path(run_dir, File.PROGRESS)) as progress:
                progress.write(f"{path.name}\n".encode())
        with contextlib.suppress(OSError):
            fenced_writes.check()
            for old in self.files()[self.keep :]:
                old.unlink()
                pieces_file.remove(old)
            pieces_file.remove_orphans(self.path, before=path)


def _check_name(path: Path) -> None:
    """Raise UnusableError if the content is of another step than the name says."""
    position = checkpoint_file.read(path)["position"]
    if isinstance(position, Mapping) and position.get("steps") != step_of(path):
        raise UnusableError(f"it is of step {position.get('steps')}, and its name says step {step_of(path)}")


def step_of(path: Path) -> int:
    """Return the number of steps in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def named_by(path: Path, check_pieces: Callable[[Path], None] = pieces_file.check_all) -> tuple[Path, str]:
    """Return the checkpoint that a path names, and its SHA-256: a file; or the newest undamaged one of a run directory.

    Raises:
        CheckpointError: there is none, or it is damaged or can't be read.
    """
    asked = f"Reading the checkpoint {path}:"
    hint = "name a checkpoint (…/checkpoints/step-00000120.pt) or a run directory"
    if path.is_file():
        try:
            return path, _checked(path, check_pieces)
        except DamagedError as error:
            raise CheckpointError(asked, f"it is damaged: {error}.", hint) from error
    folder = path / File.CHECKPOINTS if (path / File.CHECKPOINTS).is_dir() else path
    newest, refused = CheckpointFolder(folder, keep=1).newest(check_pieces)
    for damaged, why in refused.items():
        log.warning(REFUSED, damaged, why.verdict, why)
    if newest is None:
        found = "it has no undamaged checkpoint." if path.is_dir() else "there is no such file."
        raise CheckpointError(asked, found, hint)
    return newest


def _checked(path: Path, *checks: Callable[[Path], object]) -> str:
    """Return a checkpoint's SHA-256, after the checks of its content. One that can't be read is a CheckpointError."""
    try:
        digest = checkpoint_file.digest(path)
        for check in checks:
            check(path)
        return digest
    except OSError as error:
        hint = "fix that, or move the file away to resume from the one before"
        raise CheckpointError(f"Reading the checkpoint {path}:", f"{error.strerror or error}.", hint) from error
