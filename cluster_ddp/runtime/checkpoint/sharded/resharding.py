"""A part's state as it is loaded: with this rank's piece of each tensor that is sharded here, whatever was saved.

So a checkpoint of 4 ranks fits 2 ranks, and one of a model under DDP fits the same model under FSDP2, and the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint import checkpoint_file, compatibility
from cluster_ddp.runtime.checkpoint.checkpoint_file import UnusableError
from cluster_ddp.runtime.checkpoint.exactness import optimizer_state
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in, with_tensors
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.checkpoint.sharded.pieces_file import PARTS
from cluster_ddp.runtime.model import dtensor_pieces
from cluster_ddp.runtime.model.dtensor_pieces import Piece, is_sharded, local_part
from cluster_ddp.runtime.world import World


class SavedPieces:
    """The pieces of a checkpoint, read from its pieces files as they are needed; their bytes are mapped into memory.

    Args:
        checkpoint: its path.
        saved: what it holds; see `checkpoint_file.read`.
    """

    def __init__(self, checkpoint: Path, saved: Mapping[str, Any]) -> None:
        self._folder, self._files = pieces_file.folder_of(checkpoint), pieces_file.described(saved)
        self._open: dict[str, tuple[torch.Tensor, pieces_file.Index]] = {}

    def read(self, name: str, whole: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        """Return the values of the tensor of that name: of `wanted`, a DTensor, this rank's part; else all.

        Args:
            name: its place in the saved state.
            whole: a tensor of its shape and dtype, without values.
            wanted: of the same shape.

        Raises:
            UnusableError: the pieces files do not have all its values.
        """
        start, shape = (0,) * whole.dim(), tuple(whole.shape)
        first = None
        if wanted is not None:
            start, shape = dtensor_pieces.start_of(wanted), tuple(local_part(wanted).shape)
            first = dtensor_pieces.writer_of(wanted)
        try:
            return dtensor_pieces.joined(shape, start, whole.dtype, self.of(name, first))
        except ValueError as error:
            raise UnusableError(f"{name}: {error}") from None

    def of(self, name: str, first: int | None = None) -> Iterator[Piece]:
        """Yield the pieces of a tensor, with those of one rank first: a training on as many ranks needs no others.

        Each has a storage of its own, whose memory is released once the next one is asked for.
        """
        for file in sorted(self._files, key=lambda file: self._files[file]["rank"] != first):
            if file not in self._open:
                self._open[file] = pieces_file.read(self._folder / file)
            pieces, index = self._open[file]
            if name in index:
                dtype, start, shape, offset = index[name]
                kind: torch.dtype = getattr(torch, dtype)
                nbytes = torch.Size(shape).numel() * kind.itemsize
                values = torch.from_numpy(pieces[offset : offset + nbytes].numpy()).view(kind).view(shape)
                try:
                    yield Piece(tuple(start), offset, values)
                finally:  # also if no other piece is asked for
                    checkpoint_file.release(values)


def check(world: World, parts: Mapping[str, Any], states: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first sharded tensor in the states of parts, if there is one, after checking that all can be saved.

    A collective: what is wrong on one rank ends all.

    Raises:
        CheckpointError: a value can't be saved, such as one without values, or one that is split in two ways; or an
            optimizer has parameters of no module, such as those that its module had before it was sharded.
    """
    sharded: list[torch.Tensor] = []
    error: CheckpointError | None = None
    try:
        for name, tensor in tensors_in(states, PARTS):
            _check_tensor(tensor, name)
            sharded += [tensor] if is_sharded(tensor) else []
        if sharded:
            _check_optimizers(parts)
    except CheckpointError as raised:
        error = raised
    of_ranks = world.gather((error.asked, error.found, error.hint) if error else None)
    if first := next(filter(None, of_ranks), None):
        raise CheckpointError(*first) from error
    return next(iter(sharded), None)


def _check_tensor(tensor: Any, name: str) -> None:
    if tensor.is_meta:
        found = f"{name} has no values: it is on the meta device."
        hint = "after world.empty_init(), wrap the model: model = world.wrap(model, …)"
        raise CheckpointError("Saving a checkpoint:", found, hint)
    kinds = [type(one).__name__ for one in tensor.placements] if is_sharded(tensor) else []
    if kinds.count("Shard") > 1 or set(kinds) - {"Shard", "Replicate"}:
        found = f"{name} is split as {tensor.placements}: tensor parallelism is not supported."
        hint = 'shard the model with world.wrap(model, strategy="fsdp") or "hsdp" alone'
        raise CheckpointError("Saving a checkpoint:", found, hint)


def _check_optimizers(parts: Mapping[str, Any]) -> None:
    modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            stale = [one for one in optimizer_state.parameters(part) if id(one) not in known and not is_sharded(one)]
            if stale:
                found = f"{name} has parameters that no module here has."
                hint = "make it after world.wrap(model, …), which replaces parameters; and name all trained modules"
                raise CheckpointError("Saving a checkpoint:", found, hint)


def load(
    name: str,
    part: Any,
    saved: dict[str, Any],
    saved_pieces: SavedPieces,
    *,
    own_buffers: Mapping[str, torch.Tensor],
    devices: Mapping[str, str],
) -> None:
    """Load the state of a part; see `filled`.

    `own_buffers` replace those that are saved with a module; `devices` are of an optimizer, see `optimizer_state.load`.

    Raises:
        CheckpointError: the part does not accept its state.
    """
    try:
        state = filled(name, part, saved, saved_pieces)
        state.update(own_buffers)
        if isinstance(part, torch.optim.Optimizer):
            optimizer_state.load(part, state, devices)
        else:
            part.load_state_dict(state)
    except Exception as error:  # a part may raise anything for a state that it does not expect
        words = f"{type(error).__name__}: {str(error)[:300]}."
        found = f"it does not accept its state in the checkpoint: {words}"
        hint = f"make it in the same way as when the checkpoint was saved; or {compatibility.START_ANEW}"
        raise CheckpointError(f"Loading {name!r}:", found, hint) from error


def filled(name: str, part: Any, saved: dict[str, Any], saved_pieces: SavedPieces) -> dict[str, Any]:
    """Return a part's saved state with all its values, for the part's load_state_dict.

    Parameters and buffers of a module that are sharded here have their values afterwards. Others may be mapped from the
    file if the module copies them; tensors of other parts are copies.

    Args:
        name: of the part in the checkpoint.
        part: a module, an optimizer, or another part with a state.
        saved: its state in the checkpoint, as `checkpoint_file.read` returns it; it is changed.
        saved_pieces: the values of sharded tensors in it.

    Raises:
        UnusableError: the pieces files do not have all values.
    """
    own = _sharded_here(name, part, saved)
    is_module = isinstance(part, torch.nn.Module)  # it copies these; other parts may keep the given tensors
    kept = [*part.named_parameters(), *part.named_buffers()] if is_module else []
    copied_by_part = {f"{PARTS}[{name!r}][{key!r}]" for key, _ in kept}

    def value(tensor: torch.Tensor, place: str) -> torch.Tensor:
        here = own.get(place)
        if here is not None and here.shape == tensor.shape:  # else load_state_dict names it
            values = saved_pieces.read(place, tensor, here) if tensor.is_meta else dtensor_pieces.cut(tensor, here)
            local_part(here).copy_(values)
            return here
        values = saved_pieces.read(place, tensor, None) if tensor.is_meta else tensor
        if place in copied_by_part:
            return values
        return values.clone() if tensor.is_meta else checkpoint_file.taken(values)

    for key, item in saved.items():
        saved[key] = with_tensors(item, f"{PARTS}[{name!r}][{key!r}]", value)
    return saved


def _sharded_here(name: str, part: Any, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The sharded tensors that the saved values go to, by name: the part's own, or for an optimizer new ones."""
    if not isinstance(part, torch.optim.Optimizer):
        there = tensors_in(part.state_dict(), f"{PARTS}[{name!r}]")
        return {place: tensor for place, tensor in there if is_sharded(tensor)}
    found = {}
    for number, parameter in enumerate(optimizer_state.parameters(part)):
        state = saved["state"].get(number, {}) if is_sharded(parameter) else {}
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.shape == parameter.shape:
                place = f"{PARTS}[{name!r}]['state'][{number!r}][{key!r}]"
                found[place] = torch.empty_like(parameter.detach(), dtype=tensor.dtype)
    return found
