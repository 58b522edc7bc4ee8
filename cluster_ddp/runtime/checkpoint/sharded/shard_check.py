"""Before a resume, each rank checks a part of the shard files, so that all are checked at the same time.

Rank 0 looks for a checkpoint: it asks with `of_all_ranks`, as often as it needs. The others `answer` until it is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError
from cluster_ddp.runtime.checkpoint.sharded import pieces, shard_file
from cluster_ddp.runtime.checkpoint.state import TrainingState


def of_all_ranks(state: TrainingState, checkpoint: Path) -> None:
    """Check the shard files of a checkpoint, if it has any. Call it on rank 0.

    Raises:
        DamagedError: a rank can't use one; or the checkpoint can't be used.
        OSError: the checkpoint can't be read.
    """
    files, folder = shard_file.described(checkpoint_file.read(checkpoint)), shard_file.folder_of(checkpoint)
    for name in files:  # what is not there for rank 0, all ranks would wait for
        if found := shard_file.size_complaint(folder / name, files[name]):
            raise DamagedError(found)
    if files:
        state.world.broadcast((str(folder), dict(files)))
        if found := next(filter(None, state.world.gather(_complaint(state, folder, files))), None):
            raise DamagedError(found)


def done(state: TrainingState) -> None:
    """Let the other ranks go on. Call it on rank 0."""
    state.world.broadcast(None)


def answer(state: TrainingState) -> None:
    """Check this rank's shard files whenever rank 0 asks. Call it on the other ranks."""
    nothing: Any = None
    while question := state.world.broadcast(nothing):
        folder, files = question
        state.world.gather(_complaint(state, Path(folder), files))


def _complaint(state: TrainingState, folder: Path, files: shard_file.Files) -> str | None:
    """Why this rank can't use the shard files that it would read; None if it can."""
    found = (
        shard_file.complaint(folder / name, files[name], patience_s=checkpoint_file.VISIBLE_WITHIN_S)
        for name in _checked_here(state, files)
    )
    return next(filter(None, found), None)


def _checked_here(state: TrainingState, files: shard_file.Files) -> list[str]:
    """The shard files that this rank checks: its own; or, if other ranks than now have written them, its share."""
    if state.sharded is not None and pieces.writers_of(state.sharded) == {one["rank"] for one in files.values()}:
        writer = pieces.writer_of(state.sharded)
        return [name for name in files if files[name]["rank"] == writer]
    return list(files)[state.world.rank :: state.world.world_size]
