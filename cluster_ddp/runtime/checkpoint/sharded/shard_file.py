"""One rank's shard file: the bytes of its pieces and an index of them, with its SHA-256 in the last line.

All bytes are one tensor, and the index is JSON: a file of 100,000 small tensors of their own would take torch ten times
as long to read.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.files import remove_leftovers
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError, UnusableError
from cluster_ddp.runtime.checkpoint.sharded import pieces
from cluster_ddp.runtime.checkpoint.sharded.pieces import LocalShard, Piece
from cluster_ddp.runtime.model.sharded_tensor import local_part

SUFFIX = ".shards"
_READERS = 4  # one thread hashes at 0.5 to 2 GB/s

Files = Mapping[str, Mapping[str, Any]]
"""The shard files of a checkpoint by name: the `rank` that wrote it, its `sha256` and its size in `bytes`."""


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's shard files."""
    return checkpoint.with_suffix(SUFFIX)


def write(path: Path, shard: LocalShard) -> dict[str, Any]:
    """Write a rank's shard. Returns the `sha256` and the `bytes` of the file.

    Raises:
        OSError, RunDirError: as `checkpoint_file.write`.
    """
    index = {
        name: [str(piece.values.dtype).removeprefix("torch."), piece.start, tuple(piece.values.shape), piece.offset]
        for name, piece in shard.pieces.items()
    }
    sha256 = checkpoint_file.write(path, {"shard": shard.content, "index": json.dumps(index)})
    return {"sha256": sha256, "bytes": path.stat().st_size}


def complaint(path: Path, described: Mapping[str, Any], *, patience_s: float = 0.0) -> str | None:
    """Return why a shard file is not the one that is described, in words; None if it is.

    Waits so long for a file to appear: network file systems show it to other nodes late.
    """
    deadline = time.monotonic() + patience_s
    while found := size_complaint(path, described):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.5)
    try:
        same = checkpoint_file.digest(path) == described["sha256"]
        return None if same else f"its shard {path.name} is of another save"
    except DamagedError as error:
        return f"its shard {path.name}: {error}"
    except OSError as error:
        return f"its shard {path.name} can't be read: {error.strerror}"


def size_complaint(path: Path, described: Mapping[str, Any]) -> str | None:
    """Return why a shard file can't be the one that is described, in words, without reading it; None if it can."""
    try:
        size = path.stat().st_size
    except OSError as error:
        words = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        return f"its shard {path.name} {words}"
    return None if size == described["bytes"] else f"its shard {path.name} has {size} bytes, not {described['bytes']}"


def check_all(checkpoint: Path) -> None:
    """Check all shard files of a checkpoint in this process, if it has any.

    Raises:
        DamagedError: one is missing, or is not as it was written; or the checkpoint can't be used.
        OSError: the checkpoint can't be read.
    """
    there, folder = described(checkpoint_file.read(checkpoint)), folder_of(checkpoint)
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda name: complaint(folder / name, there[name]), there)
        if words := next(filter(None, found), None):
            raise DamagedError(words)


def described(saved: Mapping[str, Any]) -> Files:
    """Return what a checkpoint says of its shard files; nothing if it has none."""
    found: Files = saved.get("sharded", {}).get("files", {})
    return found


def remove(checkpoint: Path) -> None:
    """Remove the shard files of a checkpoint that is removed."""
    shutil.rmtree(folder_of(checkpoint), ignore_errors=True)


def put_aside(checkpoint: Path) -> None:
    """Rename the shard files of a damaged checkpoint, as that is renamed: they replace those of an earlier one."""
    if (folder := folder_of(checkpoint)).exists():
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)


def remove_orphans(checkpoints: Path, *, before: Path | None = None) -> None:
    """Remove shard files without a checkpoint: of failed saves, or of killed processes.

    Args:
        checkpoints: the folder of all checkpoints.
        before: the newest checkpoint: only those of earlier steps are removed. Without it, no process may write now:
            half-written files are removed, too.
    """
    for folder in checkpoints.glob(f"*{SUFFIX}" if before is None else f"step-*{SUFFIX}"):
        if before is None:
            remove_leftovers(folder)
        if not folder.with_suffix(".pt").exists() and (before is None or folder.stem < before.stem):
            shutil.rmtree(folder, ignore_errors=True)


class SavedPieces:
    """The pieces of a checkpoint, read from its shard files as they are needed; their bytes are mapped into memory."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._open: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}

    def read(self, name: str, whole: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        """Return the values of the tensor of that name: of `wanted`, a DTensor, this rank's part; else all.

        Args:
            name: its place in the saved state.
            whole: a tensor of its shape and dtype, without values.
            wanted: of the same shape.

        Raises:
            UnusableError: the shard files do not have all its values.
        """
        start, shape = (0,) * whole.dim(), tuple(whole.shape)
        first = None
        if wanted is not None:
            start, shape = pieces.start_of(wanted), tuple(local_part(wanted).shape)
            first = pieces.writer_of(wanted)
        try:
            return pieces.joined(shape, start, whole.dtype, self.of(name, first))
        except ValueError as error:
            raise UnusableError(f"{name}: {error}") from None

    def of(self, name: str, first: int | None = None) -> Iterator[Piece]:
        """Yield the pieces of a tensor, with those of one rank first: a training on as many ranks needs no others.

        Each has a storage of its own, whose memory is released once the next one is asked for.
        """
        for file in sorted(self._files, key=lambda file: self._files[file]["rank"] != first):
            if file not in self._open:
                content = checkpoint_file.load(self._folder / file)
                self._open[file] = content["shard"], json.loads(content["index"])
            shard, index = self._open[file]
            if name in index:
                dtype, start, shape, offset = index[name]
                kind = getattr(torch, dtype)
                nbytes = torch.Size(shape).numel() * kind.itemsize
                values = torch.from_numpy(shard[offset : offset + nbytes].numpy()).view(kind).view(shape)
                try:
                    yield Piece(tuple(start), offset, values)
                finally:  # also if no other piece is asked for
                    checkpoint_file.release(values)
