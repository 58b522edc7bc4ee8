"""Tensors over the ranks: sharded ones (DTensor), as FSDP2 makes of parameters, and the pieces that are saved of them.

A DTensor's dimension is split over a dimension of the mesh as torch.chunk does: into pieces of ceil(size / ranks) rows.
The last pieces may be smaller or empty (torch.distributed.tensor.placement_types, Shard).

Imports neither DTensor nor FSDP2: that takes 0.8 s, which a training under DDP does not need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; of others the tensor itself."""
    sharded: Any = tensor
    part: torch.Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole, and detached: a shard is gathered from all ranks, which is a collective."""
    sharded: Any = tensor.detach()
    whole: torch.Tensor = sharded.full_tensor() if is_sharded(tensor) else sharded
    return whole


def content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a whole tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def broadcast_storage(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Give all ranks rank 0's bytes, by way of a device. A collective."""
    its_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    value = its_bytes.to(device)
    dist.broadcast(value, src=0)
    if value is not its_bytes:
        its_bytes.copy_(value)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sharded tensor: a box of its elements."""

    start: tuple[int, ...]
    """The index of its first element in the whole tensor, one number a dimension."""
    offset: int
    """Where its values begin in the pieces file, in bytes."""
    values: torch.Tensor
    """Its values, in its shape."""


@dataclass(frozen=True, slots=True)
class LocalPieces:
    """What one rank's pieces file has of a copied state. Names are places in the state, as "parts['model']['bias']"."""

    pieces: Mapping[str, Piece]
    """By name."""
    shapes: Mapping[str, torch.Size]
    """The whole shape of each sharded tensor, by name, even if this rank has no piece of it."""
    content: torch.Tensor
    """The values of all pieces: uint8, one dimension."""


def start_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element that this rank has of a sharded tensor."""
    start = [0] * tensor.dim()
    for placement, coordinate, ranks in _split(tensor):
        if placement.is_shard():
            size = tensor.shape[placement.dim]
            start[placement.dim] = min(size, coordinate * -(-size // ranks))
    return tuple(start)


def cut(whole: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this rank has of `here`, a sharded tensor of its shape."""
    ends = _ends(start_of(here), local_part(here).shape)
    return whole[tuple(slice(start, end) for start, end in zip(start_of(here), ends))]


def is_written_here(tensor: torch.Tensor) -> bool:
    """Return whether this rank writes its piece: of the ranks with the same piece, the first one does."""
    return all(coordinate == 0 for placement, coordinate, _ in _split(tensor) if not placement.is_shard())


def writer_of(tensor: torch.Tensor) -> int:
    """Return the rank that writes the piece of a sharded tensor that this rank has."""
    own = [coordinate if placement.is_shard() else 0 for placement, coordinate, _ in _split(tensor)]
    return int(_ranks(tensor)[tuple(own)])


def writers_of(tensor: torch.Tensor) -> set[int]:
    """Return the ranks that write the pieces of a sharded tensor."""
    own = [slice(None) if placement.is_shard() else 0 for placement, _, _ in _split(tensor)]
    return set(_ranks(tensor)[tuple(own)].flatten().tolist())


def _ranks(tensor: Any) -> Any:
    return tensor.device_mesh.mesh


def _split(tensor: Any) -> Sequence[tuple[Any, int, int]]:
    """For each dimension of the mesh: how the tensor is placed, this rank's coordinate, and the number of ranks."""
    return _split_over(tensor.device_mesh, tensor.placements)


@functools.lru_cache(maxsize=8)  # a state has thousands of tensors, and one or two meshes
def _split_over(mesh: Any, placements: Sequence[Any]) -> Sequence[tuple[Any, int, int]]:
    at = mesh.get_coordinate()
    return [(placement, at[number], mesh.size(number)) for number, placement in enumerate(placements)]


def joined(shape: Sequence[int], start: Sequence[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> torch.Tensor:
    """Return the box of a tensor that begins at `start`, in a shape, made of saved pieces that do not overlap.

    A single piece that is exactly this box is returned as it is.

    Raises:
        ValueError: the pieces do not fill the box.
    """
    box, filled = None, 0
    for piece in pieces:
        if piece.start == tuple(start) and piece.values.shape == tuple(shape):
            return piece.values
        begin = [max(own, other) for own, other in zip(start, piece.start)]
        own_ends, other_ends = _ends(start, shape), _ends(piece.start, piece.values.shape)
        size = [min(own, other) - at for own, other, at in zip(own_ends, other_ends, begin)]
        if min(size, default=1) <= 0:
            continue
        box = torch.empty(tuple(shape), dtype=dtype) if box is None else box
        target = tuple(slice(at - own, at - own + count) for at, own, count in zip(begin, start, size))
        source = tuple(slice(at - other, at - other + count) for at, other, count in zip(begin, piece.start, size))
        box[target].copy_(piece.values[source])
        filled += box[target].numel()
        if filled == box.numel():  # the files of other pieces need not be read
            break
    box = torch.empty(tuple(shape), dtype=dtype) if box is None else box
    if filled != box.numel():
        raise ValueError(f"its pieces have {filled} of {box.numel()} elements")
    return box


def _ends(start: Sequence[int], shape: Sequence[int]) -> list[int]:
    return [at + size for at, size in zip(start, shape)]
