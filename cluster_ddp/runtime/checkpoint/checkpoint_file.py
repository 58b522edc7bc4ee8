"""One checkpoint file: the output of torch.save, and its SHA-256 in the last line.

`torch.load(path, weights_only=True)` reads it, too: other bytes may follow a zip archive. `digest` checks the content,
and `read` never runs code from a file (CVE-2025-32434, CVE-2026-24747: torch < 2.10).
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import mmap
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cluster_ddp.runtime.run_dir.fenced_writes import atomic_write

_MARK = b"\ncluster_ddp sha256 "
_TRAILER_BYTES = len(_MARK) + 64 + 1
_BLOCK_BYTES = 1 << 20
VISIBLE_WITHIN_S = 60.0
"""Seconds that a node waits for a file that another one has written: network file systems show it late."""


class DamagedError(Exception):
    """A file that can't be used, since it is not as it was written; the text says why."""

    verdict = "is damaged"


class UnusableError(DamagedError):
    """A file as it was written, but of content that can't be used here; the text says why."""

    verdict = "can't be used"


def import_all() -> None:
    """Import the modules that torch.save imports on its first call: no file descriptor may be left by then."""
    torch.save({}, io.BytesIO())


def write(path: Path, state: Mapping[str, Any]) -> str:
    """Write a state whole or not at all, fsync file and folder, and return its SHA-256 (hexadecimal).

    The state is of types that torch.load reads with weights_only.

    Raises:
        OSError: the disk is full, or the folder is gone or not writable.
        RunDirError: a newer start of the job has taken the run directory.
    """
    with atomic_write(path) as file:
        hashing = _Hashing(file)
        try:
            torch.save(dict(state), hashing)  # type: ignore[arg-type]  # it asks for write() and flush() only
        except RuntimeError:
            if hashing.error is not None:  # torch does not report it
                raise hashing.error from None
            raise
        digest = hashing.digest.hexdigest()
        file.write(_MARK + digest.encode() + b"\n")
    return digest


def digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's content (hexadecimal), after comparing it with its last line.

    Raises:
        DamagedError: they differ, or the last line is missing; or the path is a folder or a dangling link.
        OSError: the file can't be read.
    """
    if os.path.lexists(path) and not path.is_file():
        raise DamagedError("it is a dangling symbolic link" if path.is_symlink() else "it is not a file")
    size = path.stat().st_size - _TRAILER_BYTES
    if size <= 0:
        raise DamagedError(f"it has only {size + _TRAILER_BYTES} bytes")
    found = hashlib.sha256()
    with open(path, "rb") as file:
        left = size
        while left and (block := file.read(min(_BLOCK_BYTES, left))):
            found.update(block)
            left -= len(block)
        trailer = file.read()
    if not trailer.startswith(_MARK):
        raise DamagedError("its end is missing")
    if trailer[len(_MARK) : -1] != found.hexdigest().encode():
        raise DamagedError("its content does not match its SHA-256")
    return found.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Return the state in a file whose `digest` is right, with all tensors on the CPU.

    The tensors are the file's bytes, mapped into memory and read on use. Copy what you keep: once the file is removed,
    a network file system may no longer have its bytes (SIGBUS).

    Raises:
        UnusableError: it contains other types than tensors and plain values, or it is not a checkpoint.
        OSError: the file can't be read.
    """
    state = load(path)
    if not isinstance(state, dict) or not {"position", "parts", "ranks"} <= state.keys():
        raise UnusableError("it is not a checkpoint of cluster_ddp")
    return state


def load(path: Path) -> Any:
    """Return what `write` has written, as `read` does, whatever it is."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # whatever a broken or malicious pickle causes
        found = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
        why = f"contains {found[1]}, but only tensors and plain values are read" if found else None
        why = why or f"is not a checkpoint ({type(error).__name__})"
        raise UnusableError(f"it {why}; none of its code was run") from None  # torch's text advises to load it anyway


def taken(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor from `read` (no other), and release the memory of the file's bytes."""
    copy = tensor.clone()
    release(tensor)
    return copy


def release(tensor: torch.Tensor) -> None:
    """Release the memory of the file's bytes in a tensor from `read` (no other). A later access reads them again."""
    if tensor.layout != torch.strided:
        return
    memory = tensor.untyped_storage()  # an expanded tensor's is smaller than its size
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if nbytes > 0:  # pages of this tensor alone
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def not_as_chosen(path: Path, chosen: str) -> str | None:
    """Return why this node does not see the file that rank 0 has chosen, by its SHA-256; None if it does, in time."""

    def complaint() -> str | None:
        try:
            found = digest(path)
        except OSError as error:
            return f"here it can't be read: {error.strerror}"
        except DamagedError as error:
            return str(error)
        return None if found == chosen else f"here its SHA-256 is {found[:12]}…, on rank 0 {chosen[:12]}…"

    return once_visible(complaint)


def once_visible(complaint: Callable[[], str | None]) -> str | None:
    """Return what a look at another node's file complains of; None once it complains of nothing, within a minute."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while (found := complaint()) and time.monotonic() <= deadline:
        time.sleep(0.5)
    return found


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()
