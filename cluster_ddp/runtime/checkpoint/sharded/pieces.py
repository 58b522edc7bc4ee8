"""Which piece of a sharded tensor (torch's DTensor) this rank has, and tensors made of saved pieces.

A DTensor's dimension is split over a dimension of the mesh as torch.chunk does: into pieces of ceil(size / ranks) rows.
The last pieces may be smaller or empty (torch.distributed.tensor.placement_types, Shard).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.model.sharded_tensor import is_sharded, local_part


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sharded tensor: a box of its elements."""

    start: tuple[int, ...]
    """The index of its first element in the whole tensor, one number a dimension."""
    offset: int
    """Where its values begin in the shard, in bytes."""
    values: torch.Tensor
    """Its values, in its shape."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one rank's shard file has of a copied state. Names are places in the state, as "parts['model']['bias']"."""

    pieces: Mapping[str, Piece]
    """By name."""
    shapes: Mapping[str, torch.Size]
    """The whole shape of each sharded tensor, by name, even if this rank has no piece of it."""
    content: torch.Tensor
    """The values of all pieces: uint8, one dimension."""


def check(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor that can be saved.

    Raises:
        CheckpointError: it has no values, or is a DTensor that is not split along one dimension of its mesh.
    """
    if tensor.is_meta:
        found = f"{name} has no values: it is on the meta device."
        hint = "after world.empty_init(), wrap the model: model = world.wrap(model, …)"
        raise CheckpointError("Saving a checkpoint:", found, hint)
    if is_sharded(tensor):
        kinds = [type(one).__name__ for one in _placements(tensor)]
        if kinds.count("Shard") > 1 or set(kinds) - {"Shard", "Replicate"}:
            found = f"{name} is split as {_placements(tensor)}: tensor parallelism is not supported."
            hint = 'shard the model with world.wrap(model, strategy="fsdp") or "hsdp" alone'
            raise CheckpointError("Saving a checkpoint:", found, hint)
    return tensor


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
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    own = [coordinate if placement.is_shard() else 0 for placement, coordinate, _ in _split(tensor)]
    return int(mesh.mesh[tuple(own)])


def writers_of(tensor: torch.Tensor) -> set[int]:
    """Return the ranks that write the pieces of a sharded tensor."""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return set(mesh.mesh[tuple(slice(None) if one.is_shard() else 0 for one in _placements(tensor))].flatten().tolist())


def _placements(tensor: torch.Tensor) -> Sequence[Any]:
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    return placements


def _split(tensor: torch.Tensor) -> Sequence[tuple[Any, int, int]]:
    """For each dimension of the mesh: how the tensor is placed, this rank's coordinate, and the number of ranks."""
    return _split_over(tensor.device_mesh, _placements(tensor))  # type: ignore[attr-defined]


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
