"""One checkpoint file: what torch.save writes, and its SHA-256 in the last line.

`torch.load(path, weights_only=True)` reads it, too: a zip archive may be followed by other bytes. Reading it here first
compares the digest, and never runs code that a file might bring along (CVE-2025-32434, CVE-2026-24747: torch < 2.10).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.files import atomic_write

_MARK = b"\ncluster_ddp sha256 "
_TRAILER_BYTES = len(_MARK) + 64 + 1
_BLOCK_BYTES = 1 << 20
# How long a rank waits for a file that rank 0 has read: network file systems show it to other nodes late.
_VISIBLE_WITHIN_S = 60.0
_PLAIN = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_INT_BITS = 2039  # more, torch's weights_only does not read


class DamagedError(Exception):
    """A file that is not what was written; the text says how that was seen."""


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
        DamagedError: they differ, or there is none.
        OSError: the file can't be read.
    """
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

    Raises:
        DamagedError: it holds something other than tensors and plain values, or no checkpoint.
        OSError: the file can't be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a broken or malicious pickle leads to
        words = re.search(r"Unsupported .*?(?=\. |$)", str(error), re.M) or re.search(r".+", str(error))
        raise DamagedError(f"torch.load refuses it: {words[0][:200] if words else type(error).__name__}") from error
    if not isinstance(state, dict) or not {"position", "parts", "ranks"} <= state.keys():
        raise DamagedError("it is no checkpoint of cluster_ddp")
    return state


def read_as_chosen(path: Path, chosen: str) -> dict[str, Any]:
    """The state that rank 0 has chosen by its SHA-256, once this node sees it, too.

    Raises:
        CheckpointError: it doesn't within a minute, or it can't be loaded.
    """
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            if (found := digest(path)) == chosen:
                return read(path)
            complaint = f"here its SHA-256 is {found[:12]}…, on rank 0 {chosen[:12]}…"
        except OSError as error:
            complaint = f"here it can't be read: {error.strerror}"
        except DamagedError as error:
            complaint = str(error)
            if complaint.startswith("torch.load"):
                break
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    hint = "is the run folder on a file system that all nodes share?"
    raise CheckpointError(f"Going on from {path}, as rank 0 does:", f"{complaint}.", hint)


class HostCopy:
    """Copies states into memory of its own, which it uses again for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, value: Any, name: str = "state") -> Any:
        """A copy that changes no more, with all tensors on the CPU; valid until the next call.

        Raises:
            CheckpointError: something in it is neither a tensor nor a plain value; it says where.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), name)
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            value = value.item()  # a NumPy number, such as a scheduler's learning rate
        if (type(value) in _PLAIN and value != b"") or (type(value) is int and value.bit_length() <= _INT_BITS):
            return value
        if isinstance(value, Mapping):
            copied = {self.of(key, name): self.of(item, f"{name}[{key!r}]") for key, item in value.items()}
            if not isinstance(value, OrderedDict):
                return copied
            ordered = OrderedDict(copied)
            ordered.__dict__.update(self.of(vars(value), name))  # a module's state_dict has _metadata
            return ordered
        if isinstance(value, (list, tuple)):
            items = [self.of(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        raise CheckpointError(
            "Saving a checkpoint:",
            f"{name} is a {type(value).__name__} that torch.load does not read with weights_only.",
            "let state_dict() hold tensors, numbers, texts, lists and dictionaries only",
        )

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor.cpu().clone()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[name] = buffer
        return buffer.copy_(tensor)


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
