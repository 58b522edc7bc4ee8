"""A copy of a training's state, or of this rank's part of it, in the host's memory. All saves use the same memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.model.dtensor_pieces import (
    LocalPieces,
    Piece,
    is_sharded,
    is_written_here,
    local_part,
    start_of,
)

log = logging.getLogger("cluster_ddp")

_PLAIN = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_INT_BITS = 2039  # torch's weights_only reads no longer ones
_ALIGNED_TO = 64
_PAGE = mmap.PAGESIZE


class HostCopy:
    """Copies states of a device into memory of the host, just large enough for them.

    Of a sharded tensor this rank's piece is copied, if its pieces file has it. A rank without `whole` copies no others.
    Tensors that are not copied are empty in the copy.
    """

    def __init__(self, device: torch.device, *, whole: bool = True) -> None:
        is_gpu = device.type == "cuda"
        self._whole, self._is_whole_kept = _Memory(pinned=is_gpu), whole
        self._sharded = _Memory(pinned=is_gpu)
        self._shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, Piece] = {}

    def reserve(self, value: Any, name: str = "state") -> None:
        """Allocate the memory for a copy of a value, unless there is enough. See `with_tensors`."""
        totals = {self._whole: 0, self._sharded: 0}
        for _, tensor in tensors_in(value, name):
            memory, local = self._source(tensor)
            if memory is not None and _fits(local):
                totals[memory] += _aligned(local.nbytes)
        for memory, total in totals.items():
            memory.reserve(total)

    def of(self, value: Any, name: str = "state") -> Any:
        """Return a copy of a value with all tensors on the CPU, valid until the next call. See `with_tensors`.

        Copies from a GPU run asynchronously: synchronize before you read them.
        """
        with torch.no_grad():  # a DTensor gives its local part at once then
            try:
                return self._filled(value, name)
            except _FullError:
                self.reserve(value, name)
                return self._filled(value, name)

    def _filled(self, value: Any, name: str) -> Any:
        self._whole.used = self._sharded.used = 0
        self._shapes, self._pieces = {}, {}
        return with_tensors(value, name, self._copy)

    @property
    def local_pieces(self) -> LocalPieces:
        """What this rank's pieces file has of the last copy."""
        return LocalPieces(self._pieces, self._shapes, self._sharded.content())

    def _source(self, tensor: torch.Tensor) -> tuple[_Memory | None, torch.Tensor]:
        """The memory that a tensor is copied to, None for no copy; and this rank's part of it."""
        if is_sharded(tensor):
            return (self._sharded if is_written_here(tensor) else None), local_part(tensor)
        return (self._whole if self._is_whole_kept else None), tensor

    def _copy(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        memory, local = self._source(tensor)
        if is_sharded(tensor):
            self._shapes[name] = tensor.shape
        if memory is None:
            return torch.empty(0, dtype=tensor.dtype)
        if memory is self._sharded:
            local = local.contiguous()  # its file has no strides
        offset, copied = memory.copy_of(local) if _fits(local) else (0, local.cpu().clone())
        if memory is self._sharded and local.numel():
            self._pieces[name] = Piece(start=start_of(tensor), offset=offset, values=copied)
        return copied


class _FullError(Exception):
    """A copy needs more memory than there is."""


class _Memory:
    """One piece of the host's memory, which all saves use.

    For GPUs it is pinned, so that copies run at the full speed of the bus without the CPU. (torch's pinned allocator
    would round each tensor up to a power of two.)
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = mmap.mmap(-1, _PAGE)
        self.used = 0
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, total: int) -> None:
        """Allocate so many bytes, unless there are enough."""
        if total > len(self._memory):
            self._unpin()
            self._memory = mmap.mmap(-1, total)
            torch.frombuffer(self._memory, dtype=torch.uint8)[::_PAGE] = 0  # the system hands it out now, not in a save
            self._pinned = self._pinned and _register(self._memory)
            if self._pinned:
                self._unpin = weakref.finalize(self, _unregister, self._memory)
                self._unpin.atexit = False  # at exit it could wait for kernels

    def copy_of(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Copy a tensor behind the one before. Returns where it begins, in bytes, and the copy."""
        start, self.used = self.used, self.used + _aligned(tensor.nbytes)
        if self.used > len(self._memory):
            raise _FullError
        # Each tensor gets its own storage: torch.save would write a shared one once for each dtype.
        copied = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        if not tensor.is_contiguous():
            tensor = tensor.clone()  # without gaps; what has none keeps its strides, as those of channels_last
        copied = copied.as_strided(tensor.shape, tensor.stride())
        return start, copied.copy_(tensor, non_blocking=True)

    def content(self) -> torch.Tensor:
        """All that was copied: uint8, one dimension."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=max(1, self.used))


def _register(memory: mmap.mmap) -> bool:
    """Pin exactly this memory (cudaHostRegister). Return whether that succeeded."""
    status = int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0))
    if status:
        _forget_error()
        log.warning(
            "%.1f GB for checkpoints can't be pinned (CUDA error %d): training waits longer for each save.",
            *(len(memory) / 1e9, status),
        )
    return status == 0


def _forget_error() -> None:
    """Clear CUDA's (or HIP's) last error: torch would find it after the next kernel, and blame that kernel."""
    names = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[5] for line in lines if ".so" in line}:
        if function := names.get(Path(path).name.partition(".")[0]):
            getattr(ctypes.CDLL(path), function)()


def _unregister(memory: mmap.mmap) -> None:
    with contextlib.suppress(Exception):  # after an error of the device every call to it fails
        torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _fits(tensor: torch.Tensor) -> bool:
    """Whether its values can be one piece of memory; an empty tensor has none."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_TO) * _ALIGNED_TO


def tensors_in(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a value, with their names. See `with_tensors`."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(tensor: torch.Tensor, where: str) -> torch.Tensor:
        found.append((where, tensor))
        return tensor

    with_tensors(value, name, note)
    return found


def with_tensors(value: Any, name: str, tensor: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    """Return a copy of the containers and plain values of a value, with each tensor replaced.

    They are in mappings, lists and tuples. `tensor` returns the replacement of one, without gradients, and is given its
    name, which begins with `name`, such as "parts['model']['weight']".

    Raises:
        CheckpointError: something in it is neither a tensor nor a plain value; the error says where.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value.detach() if value.requires_grad else value, name)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy number, such as a scheduler's learning rate
    if (type(value) in _PLAIN and value != b"") or (type(value) is int and value.bit_length() <= _INT_BITS):
        return value
    if isinstance(value, Mapping):
        copied = {
            with_tensors(key, name, tensor): with_tensors(item, f"{name}[{key!r}]", tensor)
            for key, item in value.items()
        }
        if isinstance(value, Counter):  # MultiStepLR's milestones; of dictionaries, torch.load takes these three kinds
            return Counter(copied)
        if not isinstance(value, OrderedDict):
            return copied
        ordered = OrderedDict(copied)
        ordered.__dict__.update(with_tensors(vars(value), name, tensor))  # a module's state_dict has _metadata
        return ordered
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, f"{name}[{i}]", tensor) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise CheckpointError(
        "Saving a checkpoint:",
        f"{name} is a {type(value).__name__} that torch.load does not read with weights_only.",
        "let state_dict() return only tensors, numbers, strings, lists and dictionaries",
    )
