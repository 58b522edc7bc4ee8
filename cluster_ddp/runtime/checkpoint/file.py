"""One checkpoint file: what torch.save writes, and its SHA-256 in the last line.

`torch.load(path, weights_only=True)` reads it, too: a zip archive may be followed by other bytes. Reading it here first
compares the digest, and never runs code that a file might bring along (CVE-2025-32434, CVE-2026-24747: torch < 2.10).
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import mmap
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cluster_ddp.files import atomic_write

_MARK = b"\ncluster_ddp sha256 "
_TRAILER_BYTES = len(_MARK) + 64 + 1
_BLOCK_BYTES = 1 << 20
# How long a node waits for a file that rank 0 has read.
_VISIBLE_WITHIN_S = 60.0


class DamagedError(Exception):
    """A file that is not what was written; the text says how that was seen."""


def import_all() -> None:
    """Import what torch.save imports when it is first called: by then there may be no descriptor for that."""
    torch.save({}, io.BytesIO())


def write(path: Path, state: Mapping[str, Any]) -> str:
    """Write a state whole or not at all, with file and folder fsynced.

    Returns:
        The SHA-256 as 64 hexadecimal digits.

    Raises:
        OSError: the disk is full, the folder gone or not writable.
    """
    with atomic_write(path) as file:
        hashing = _Hashing(file)
        try:
            torch.save(dict(state), hashing)  # type: ignore[arg-type]  # it asks for write() and flush() only
        except RuntimeError:
            if hashing.error is not None:  # which torch does not tell
                raise hashing.error from None
            raise
        digest = hashing.digest.hexdigest()
        file.write(_MARK + digest.encode() + b"\n")
    return digest


def digest(path: Path) -> str:
    """The SHA-256 of a checkpoint's content, compared with the one in its last line.

    Raises:
        DamagedError: they differ, or there is none; a folder, or a link to nothing, has its name.
        OSError: the file can't be read.
    """
    if os.path.lexists(path) and not path.is_file():
        raise DamagedError("it is a link to nothing" if path.is_symlink() else "it is no file")
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
        raise DamagedError("its content has another SHA-256 than was written")
    return found.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """The state in a file whose digest is known to be right, all tensors on the CPU.

    They are the file's own bytes, mapped into memory, and read when they are used: take copies of what is to stay. The
    file may be removed by then, and a network file system has no bytes for it any more (SIGBUS).

    Raises:
        DamagedError: it holds something other than tensors and plain values, or no checkpoint.
        OSError: the file can't be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # whatever a broken or malicious pickle leads to
        raise DamagedError(_refusal(error)) from None  # torch advises to load it all the same
    if not isinstance(state, dict) or not {"position", "parts", "ranks"} <= state.keys():
        raise DamagedError("it is no checkpoint of cluster_ddp")
    return state


def _refusal(error: Exception) -> str:
    """Why torch.load does not take a file, without what it advises: to let the file run its code."""
    if found := re.search(r"GLOBAL ([\w.]{1,100})", str(error)):
        return f"it asks for {found[1]}, where tensors and plain values are all that is read; nothing of it was run"
    return f"its content is no checkpoint's ({type(error).__name__}); nothing of it was run"


def taken(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that `read` has given, and of no other: the memory that the file's bytes took is let go."""
    copy = tensor.clone()
    if tensor.layout != torch.strided:
        return copy
    memory = tensor.untyped_storage()  # of an expanded tensor, less than its own size
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if nbytes > 0:  # pages that are this tensor's alone; where they are read again, it is from the file
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)
    return copy


def not_as_chosen(path: Path, chosen: str) -> str | None:
    """Why this node does not see the file that rank 0 has chosen by its SHA-256; None once it does.

    Waits a minute for it, since network file systems show a file to other nodes late.
    """
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            if (found := digest(path)) == chosen:
                return None
            complaint = f"here its SHA-256 is {found[:12]}…, on rank 0 {chosen[:12]}…"
        except OSError as error:
            complaint = f"here it can't be read: {error.strerror}"
        except DamagedError as error:
            complaint = str(error)
        if time.monotonic() > deadline:
            return complaint
        time.sleep(0.5)


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
