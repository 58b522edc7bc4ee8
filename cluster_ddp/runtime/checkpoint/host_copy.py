"""A copy of a training's state in the host's memory, which is used again for each save."""

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

log = logging.getLogger("cluster_ddp")

_PLAIN = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_INT_BITS = 2039  # more, torch's weights_only does not read
_ALIGNED_TO = 64
_PAGE = mmap.PAGESIZE


class HostCopy:
    """Copies states into one piece of memory of its own, as large as they are.

    For GPUs it is pinned, so that copies run at the bus' full speed without the CPU. (torch's pinned allocator would
    round each tensor up to a power of two.)

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = mmap.mmap(-1, _PAGE)
        self._used = 0
        self._unpin: Callable[[], object] = lambda: None

    def reserve(self, value: Any, name: str = "state") -> None:
        """Get the memory for a copy of such a value, if it isn't there yet.

        Raises:
            CheckpointError: something in it is neither a tensor nor a plain value; it says where.
        """
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += _aligned(tensor.nbytes) if _fits(tensor) else 0
            return tensor

        with_tensors(value, name, count)
        if total > len(self._memory):
            self._unpin()
            self._memory = mmap.mmap(-1, total)
            torch.frombuffer(self._memory, dtype=torch.uint8)[::_PAGE] = 0  # the system hands it out now, not in a save
            self._pinned = self._pinned and _register(self._memory)
            if self._pinned:
                self._unpin = weakref.finalize(self, _unregister, self._memory)
                self._unpin.atexit = False  # at the process' end it could wait for kernels, and the memory goes anyhow

    def of(self, value: Any, name: str = "state") -> Any:
        """A copy that changes no more, with all tensors on the CPU; valid until the next call.

        From a GPU, it is whole when the device has done its work: synchronize before it is read.

        Raises:
            CheckpointError: something in it is neither a tensor nor a plain value; it says where.
        """
        self.reserve(value, name)
        self._used = 0
        return with_tensors(value, name, self._copy)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _fits(tensor):
            return tensor.cpu().clone()
        start, self._used = self._used, self._used + _aligned(tensor.nbytes)
        # A storage of its own for each tensor: torch.save would write one that they shared for each of their dtypes.
        copied = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return copied.view(tensor.shape).copy_(tensor.contiguous(), non_blocking=True)


def _register(memory: mmap.mmap) -> bool:
    """Pin memory that is there, no more and no less (cudaHostRegister); whether that was possible."""
    status = int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0))
    if status:
        _forget_error()
        log.warning(
            "%.1f GB for checkpoints can't be pinned (CUDA error %d): saves keep the training waiting for longer.",
            *(len(memory) / 1e9, status),
        )
    return status == 0


def _forget_error() -> None:
    """Take CUDA's (or HIP's) note of the last error away: torch would find it after the next kernel, and blame that."""
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
    """Whether its values can be one piece of memory; an empty one has none."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_TO) * _ALIGNED_TO


def with_tensors(value: Any, name: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers and plain values, with each tensor as `tensor` gives it.

    Raises:
        CheckpointError: something in it is neither; it says where.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value.detach())
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
        "let state_dict() hold tensors, numbers, texts, lists and dictionaries only",
    )
