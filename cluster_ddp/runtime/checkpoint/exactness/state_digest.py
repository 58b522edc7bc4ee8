"""Digests of a state: of a part of it at each save, and of all of it as a loop or an epoch begins.

If a state is large, a save's digest covers a few elements of each tensor, others each time: all of them would take as
long as the copy.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch

from cluster_ddp.runtime.checkpoint.host_copy import with_tensors
from cluster_ddp.runtime.model.dtensor_pieces import is_sharded, local_part
from cluster_ddp.runtime.world import World

_PARTS = 64  # of a large state; so many digests cover all of it
_SMALL_BYTES = 1 << 20  # a smaller one is covered whole
_COPIED_BYTES = 1 << 24  # of a tensor at a time, if all of it is covered
_ELEMENTS = 64  # of a tensor, at least
_ROW = 4096
Key = TypeVar("Key")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Begun = tuple[Any, list[torch.Tensor]]
"""The plain values of a state, with types and shapes of its tensors; and sums over their bits, an int64 each."""


def begin(state: Any, number: int) -> Begun:
    """Begin the digest of that number, from 0; sharded tensors count by type and shape only.

    Raises:
        CheckpointError: a value can't be saved.
    """
    plain, tensors = _content(state)
    parts = min(_PARTS, 1 + sum(tensor.nbytes for tensor in tensors) // _SMALL_BYTES)
    alike = collections.defaultdict[tuple[torch.device, int], list[torch.Tensor]](list)
    for tensor in tensors:
        looked_at = _part_of(tensor, number % parts, parts)
        alike[looked_at.device, looked_at.itemsize].append(looked_at)
    return plain, [_sum_of_bits(torch.cat(group)) for group in alike.values()]


def end(begun: Begun) -> str:
    """Return the digest. A GPU must have done its work."""
    plain, sums = begun
    return sha256(repr((plain, _values(sums))).encode()).hexdigest()[:16]


def of_rank(world: World, states: Mapping[Key, Any]) -> dict[Key, str]:
    """Return a digest of all of each of these states as this rank has it, with its parts of sharded tensors.

    Raises:
        CheckpointError: a value can't be saved.
    """
    own = {key: with_tensors(state, "", lambda tensor, _: local_part(tensor)) for key, state in states.items()}
    begun = {key: _begin_whole(state) for key, state in own.items()}
    world.synchronize()
    return {key: end(one) for key, one in begun.items()}


def weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a module without its buffers."""
    buffers = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in module.state_dict().items() if name not in buffers}


def _content(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """The plain values of a state, with types and shapes of its tensors; and those tensors whose bits can be read."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, _: str) -> Any:
        if not is_sharded(tensor) and tensor.layout == torch.strided and not tensor.is_quantized:
            tensors.append(tensor)
        return tensor.dtype, tuple(tensor.shape)

    return with_tensors(state, "", note), tensors


def _begin_whole(state: Any) -> Begun:
    """Begin a digest of all elements."""
    plain, tensors = _content(state)
    sums = []
    for tensor in tensors:
        parts = 1 + tensor.nbytes // _COPIED_BYTES
        sums += [_sum_of_bits(torch.cat([_part_of(tensor, number, parts)])) for number in range(parts)]
    return plain, sums


def _part_of(tensor: torch.Tensor, number: int, parts: int) -> torch.Tensor:
    """One of so many parts of a tensor's elements, as integers, in the order in which they are in memory."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not real.is_contiguous():
        real = real.permute(sorted(range(real.dim()), key=real.stride, reverse=True))
    flat = real.reshape(-1)
    size = max(_ELEMENTS, -(-flat.numel() // parts))
    start = max(0, min(number * size, flat.numel() - size))
    return flat[start : start + size].view(_INTEGERS[flat.itemsize])


def _sum_of_bits(values: torch.Tensor) -> torch.Tensor:
    """A sum that depends on each bit and its place: of words, each times a number of its place in a row."""
    words = values.view(torch.int64) if values.nbytes % 8 == 0 else values
    factors, rows = _factors(values.device), words.numel() // _ROW
    rest = words[rows * _ROW :]
    of_rows = words[: rows * _ROW].view(rows, _ROW).sum(0, dtype=torch.int64)
    return (of_rows * factors).sum() + (rest * factors[: rest.numel()]).sum()


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (_ROW,), generator=generator).mul_(2).add_(1).to(device)


def _values(sums: Sequence[torch.Tensor]) -> list[list[int]]:
    """The values of tensors of one element, device by device."""
    devices = dict.fromkeys(one.device for one in sums)
    return [torch.stack([one for one in sums if one.device == device]).tolist() for device in devices]
