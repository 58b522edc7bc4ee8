"""One rank's pieces file: the bytes of its pieces and an index of them, with its SHA-256 in the last line.

All bytes are one tensor, and the index is JSON: a file of 100,000 small tensors of their own would take torch ten times
as long to read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.run.files import ensure_dir, with_reserve
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError, UnusableError
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.model import dtensor_pieces
from cluster_ddp.runtime.model.dtensor_pieces import LocalPieces
from cluster_ddp.runtime.run_dir import fenced_writes

SUFFIX = ".pieces"
_NAME = re.compile(r"rank-\d+-[\w-]+\.pt|\.rank-\d+-[\w-]+\.pt\.[0-9a-f]{8}\.tmp")
_READERS = 4  # one thread hashes at 0.5 to 2 GB/s

PARTS = "state['parts']"
"""Begins the name of each tensor in the parts' states."""

Index = Mapping[str, tuple[str, list[int], list[int], int]]
"""Of each piece in a pieces file, by the tensor's name: its dtype, where it starts, its shape, its offset in bytes."""

Files = Mapping[str, Mapping[str, Any]]
"""The pieces files of a checkpoint by name: the `rank` that wrote it, its `sha256` and its size in `bytes`."""


def folder_of(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint's pieces files."""
    return checkpoint.with_suffix(SUFFIX)


def write(path: Path, local: LocalPieces) -> dict[str, Any]:
    """Write a rank's pieces. Returns the `sha256` and the `bytes` of the file.

    Raises:
        OSError, RunDirError: as `checkpoint_file.write`.
    """
    index = {
        name: [str(piece.values.dtype).removeprefix("torch."), piece.start, tuple(piece.values.shape), piece.offset]
        for name, piece in local.pieces.items()
    }
    sha256 = checkpoint_file.write(path, {"pieces": local.content, "index": json.dumps(index)})
    return {"sha256": sha256, "bytes": path.stat().st_size}


def read(path: Path) -> tuple[torch.Tensor, Index]:
    """Return the bytes of a pieces file and their index.

    Raises:
        UnusableError: its content is of another form, or its index leads beyond its bytes.
        OSError: it can't be read.
    """
    content = checkpoint_file.load(path)
    try:
        pieces, index = content["pieces"], json.loads(content["index"])
        if pieces.dtype != torch.uint8 or pieces.dim() != 1 or pieces.device.type != "cpu":
            raise ValueError("its bytes are no tensor of bytes")
        for dtype, start, shape, offset in index.values():
            numbers = [*start, *shape, offset]
            if not all(type(number) is int and number >= 0 for number in numbers) or len(start) != len(shape):
                raise ValueError("a place in it is no number of elements")
            if offset + math.prod(shape) * _dtype(dtype).itemsize > len(pieces):
                raise ValueError("its index leads beyond its bytes")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnusableError(f"it is of another form ({type(error).__name__}: {str(error)[:100]})") from None
    return pieces, index


def _dtype(name: str) -> torch.dtype:
    """The dtype of that name in torch. ValueError if there is none."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]} is no dtype")
    return found


def complaint(path: Path, described: Mapping[str, Any]) -> str | None:
    """Return why a pieces file is not the one that is described, or can't be used, in words; None if it can."""
    if found := size_complaint(path, described):
        return found
    try:
        if checkpoint_file.digest(path) != described["sha256"]:
            return f"its pieces file {path.name} is of another save"
        read(path)
        return None
    except DamagedError as error:
        return f"its pieces file {path.name}: {error}"
    except OSError as error:
        return f"its pieces file {path.name} can't be read: {error.strerror}"


def size_complaint(path: Path, described: Mapping[str, Any]) -> str | None:
    """Return why a pieces file can't be the one that is described, in words, without reading it; None if it can."""
    try:
        size = path.stat().st_size
    except OSError as error:
        words = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        return f"its pieces file {path.name} {words}"
    return (
        None
        if size == described["bytes"]
        else f"its pieces file {path.name} has {size} bytes, not {described['bytes']}"
    )


def described(saved: Mapping[str, Any]) -> Files:
    """Return what a checkpoint says of its pieces files; nothing if it has none.

    Raises:
        UnusableError: that is of another form.
    """
    try:
        found = dict(saved.get("sharded", {"files": {}})["files"])
        for name, file in found.items():
            kinds = [type(file[key]) for key in ("rank", "sha256", "bytes")]
            if kinds != [int, str, int] or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r:.60}")
    except (LookupError, TypeError, ValueError) as error:
        raise UnusableError(f"its list of pieces files is of another form ({type(error).__name__}: {error})") from None
    return found


def check_all(checkpoint: Path) -> None:
    """Check all pieces files of a checkpoint in this process, if it has any.

    Raises:
        DamagedError: one is missing, or is not as it was written; or the checkpoint can't be used.
        OSError: the checkpoint can't be read.
    """
    saved, folder = checkpoint_file.read(checkpoint), folder_of(checkpoint)
    files = described(saved)
    with ThreadPoolExecutor(_READERS) as readers:
        _refuse(readers.map(lambda name: complaint(folder / name, files[name]), files))
    _refuse_gaps(saved, folder, files)


def check_on_all_ranks(world: Collectives, sharded: torch.Tensor | None, checkpoint: Path) -> None:
    """Do the same as `check_all`, but each rank checks a part of the files, all at the same time.

    Call it on rank 0, as often as needed, while the others `answer_checks`. It ends them by `world.broadcast(None)`.

    Args:
        sharded: a sharded tensor of this training, if there is one: each rank checks what it will read.
    """
    saved, folder = checkpoint_file.read(checkpoint), folder_of(checkpoint)
    files = described(saved)
    _refuse(size_complaint(folder / name, files[name]) for name in files)  # what is not here, all ranks would wait for
    if files:
        world.broadcast((str(folder), dict(files)))
        _refuse(world.gather(_complaint_here(world, sharded, folder, files)))
    _refuse_gaps(saved, folder, files)


def answer_checks(world: Collectives, sharded: torch.Tensor | None) -> None:
    """Check this rank's pieces files whenever rank 0 asks. Call it on the other ranks."""
    nothing: Any = None
    while question := world.broadcast(nothing):
        folder, files = question
        world.gather(_complaint_here(world, sharded, Path(folder), files))


def _complaint_here(world: Collectives, sharded: torch.Tensor | None, folder: Path, files: Files) -> str | None:
    """Why this rank can't use its pieces files, or if other ranks than now have written them, its share; or None."""
    mine = list(files)[world.rank :: world.world_size]
    if sharded is not None and dtensor_pieces.writers_of(sharded) == {one["rank"] for one in files.values()}:
        mine = [name for name in files if files[name]["rank"] == dtensor_pieces.writer_of(sharded)]
    for name in mine:
        checkpoint_file.once_visible(partial(size_complaint, folder / name, files[name]))
        if found := complaint(folder / name, files[name]):
            return found
    return None


def _refuse(complaints: Iterable[str | None]) -> None:
    """Raise DamagedError for the first complaint, if there is one."""
    if words := next(filter(None, complaints), None):
        raise DamagedError(words)


def _refuse_gaps(saved: Mapping[str, Any], folder: Path, files: Files) -> None:
    """Raise UnusableError unless a checkpoint's pieces files have all of each sharded tensor."""
    wholes = {name: tensor for name, tensor in tensors_in(saved["parts"], PARTS) if tensor.is_meta}
    found: Counter[str] = Counter()
    for file in files:
        for name, (dtype, start, shape, _) in read(folder / file)[1].items():
            whole = wholes.get(name)
            if whole is None or _dtype(dtype) != whole.dtype or not _is_in(start, shape, whole.shape):
                raise UnusableError(f"its pieces file {file} has a piece that is none of its {name[:200]}")
            found[name] += math.prod(shape)
    for name, whole in wholes.items():
        if found[name] != whole.numel():
            raise UnusableError(f"its pieces files have {found[name]} of the {whole.numel()} elements of {name[:200]}")


def _is_in(start: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) == len(whole) and all(at + size <= end for at, size, end in zip(start, shape, whole))


def name_of(rank: int, token: str) -> str:
    """Return the name of a rank's pieces file, by a `token` that is another one for each save."""
    return f"rank-{rank}-{token}.pt"


def make_folder(checkpoint: Path) -> Path:
    """Make the folder of a checkpoint's pieces files, if it is missing, and return it.

    Raises:
        OSError: it can't be made, or a link is in its place.
    """
    folder = folder_of(checkpoint)
    ensure_dir(folder)
    with _opened(folder):
        return folder


def names_in(folder: Path) -> list[str]:
    """Return the names of pieces files in a folder, also half-written ones; none if a link is in its place."""
    with suppress(OSError), _opened(folder) as descriptor:
        return [entry.name for entry in os.scandir(descriptor) if _NAME.fullmatch(entry.name)]
    return []


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of `names_in` from a folder, but nothing that a link leads to."""
    with suppress(OSError), _opened(folder) as descriptor:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)


def remove(checkpoint: Path) -> None:
    """Remove the pieces files of a checkpoint that is removed, and their folder unless others have files in it."""
    _remove_folder(folder_of(checkpoint))


def _remove_folder(folder: Path) -> None:
    remove_files(folder, names_in(folder))
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder of pieces files.

    Raises:
        OSError: a link is in its place, or it is of another owner than the folder of checkpoints.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = with_reserve(lambda: os.open(folder, flags))
    try:
        if os.fstat(descriptor).st_uid != folder.parent.stat().st_uid:
            raise PermissionError(errno.EPERM, "It is of another owner than the folder that it is in", str(folder))
        fenced_writes.check()  # after it is open: the run directory has it
        yield descriptor
    finally:
        os.close(descriptor)


def put_aside(checkpoint: Path) -> None:
    """Rename the pieces files of a damaged checkpoint, as that is renamed: they replace those of an earlier one."""
    if (folder := folder_of(checkpoint)).exists():
        aside = folder.with_name(f"{folder.name}.damaged")
        _remove_folder(aside)
        if not aside.exists():  # somebody else has files there
            folder.replace(aside)


def remove_orphans(checkpoints: Path, *, before: Path | None = None) -> None:
    """Remove pieces files without a checkpoint: of failed saves, or of killed processes.

    Args:
        checkpoints: the folder of all checkpoints.
        before: the newest checkpoint: only those of earlier steps are removed. Without it, no process may write now:
            half-written files are removed, too.
    """
    for folder in checkpoints.glob(f"*{SUFFIX}" if before is None else f"step-*{SUFFIX}"):
        if before is None:
            remove_files(folder, [name for name in names_in(folder) if name.endswith(".tmp")])
        if not folder.with_suffix(".pt").exists() and (before is None or folder.stem < before.stem):
            _remove_folder(folder)
