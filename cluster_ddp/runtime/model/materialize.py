"""A recorded constructor's operations, run again on this rank's device; `empty_init` records them."""

from __future__ import annotations

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from cluster_ddp.runtime import rng
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.model.dtensor_pieces import broadcast_storage, content, is_sharded, local_part, require_same

META = torch.device("meta")

Owner = tuple[torch.nn.Module, str, torch.Tensor]
"""A module that has a parameter or buffer of the body, its name there, and what that is on the meta device."""


@dataclass(frozen=True)
class View:
    """A tensor of the body: where it lies in which content of a storage, by number."""

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self, nbytes: int) -> bool:
        """Return whether it has all elements of a storage of this size, each once."""
        expected = 1
        for stride, length in sorted((stride, length) for stride, length in zip(self.stride, self.size) if length != 1):
            if stride != expected:
                return False
            expected *= length
        return self.offset == 0 and 0 < expected * self.dtype.itemsize == nbytes


@dataclass(frozen=True)
class Operation:
    """One that makes or changes tensors. Of its arguments, tensors of the body are views; others are copies."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[tuple[int, View], ...]
    """Those of its results, by their place, that have a new storage."""
    is_random: bool
    begins_at: torch.Tensor | int | None
    """The generator's state before it; or the number of the operation that left it so, if that is not the last one."""
    fresh: tuple[int, int] | None
    """The number of the content that it writes whole without reading it, and the size in bytes."""

    def touched(self) -> set[int]:
        """Return the numbers of what it reads, makes or changes."""
        views = [one for one in tree_leaves([self.arguments, self.options]) if isinstance(one, View)]
        return {one.number for one in views} | {view.number for _, view in self.made}


@dataclass
class Recording:
    """What the body did. `generator` is the state of the device's generator before it."""

    device: torch.device
    generator: torch.Tensor
    operations: list[Operation] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """Of what storages contain now, by the storage's id. An operation that writes all of it begins a new content."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """By number; kept, so that an id is no other's."""
    registered: dict[int, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)
    """Parameters and buffers, by their id, and how often each had been changed when the body ended."""
    ends_after: int | None = None
    """The random operation after which the body ended; None if it had set the generator's state itself."""

    def end(self, *, after: int | None) -> None:
        """Note after which random operation the body ended; see `ends_after`."""
        self.ends_after = after

    def register(self, tensors: Iterable[weakref.ref[torch.Tensor]]) -> None:
        """Note the parameters and buffers that the body has left."""
        self.registered = {id(tensor): (one, tensor._version) for one in tensors if (tensor := one()) is not None}

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of what a tensor's storage contains; None if it was not made in the body."""
        return self.numbers.get(id(tensor.untyped_storage()))

    def renew(self, storage: torch.UntypedStorage) -> int:
        """Return a new number for what a storage contains from now on."""
        self.numbers[id(storage)] = number = len(self.storages)
        self.storages.append(storage)
        return number

    def view(self, tensor: torch.Tensor) -> View:
        """Return what describes a tensor on the meta device."""
        number = self.number(tensor)
        number = self.renew(tensor.untyped_storage()) if number is None else number
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def digest(self) -> str:
        """Return a SHA-256 of what the body did, without the generator's states."""
        found = hashlib.sha256()
        for one in self.operations:
            found.update(repr((one.function.__name__, one.made, type(one.begins_at).__name__)).encode())
            for leaf in tree_leaves([one.arguments, one.options]):
                found.update(content(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
        return found.hexdigest()


class Replay:
    """Real tensors in place of those on the meta device, on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Those that are alive, by number."""

    def tensor(self, view: View) -> torch.Tensor:
        """Return the tensor that a view describes."""
        empty = torch.empty(0, dtype=view.dtype, device=self._device)
        return empty.set_(self.storages[view.number], view.offset, view.size, view.stride)

    def run(self, operation: Operation) -> None:
        """Run an operation, and keep the storages that it makes."""
        if operation.fresh is not None:
            number, size = operation.fresh
            self.storages[number] = torch.UntypedStorage(size, device=self._device)
        arguments, options = tree_map(self._real, (operation.arguments, operation.options))
        with torch.no_grad():
            results = tree_leaves(operation.function(*arguments, **options))
            for at, view in operation.made:
                self.storages[view.number] = _laid_out(results[at], view).untyped_storage()

    def _real(self, value: Any) -> Any:
        if isinstance(value, View):
            return self.tensor(value)
        if isinstance(value, torch.Tensor):
            return value.to(self._device) if value.dim() else value
        return self._device if value == META else value


def _laid_out(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """The tensor in the layout that it had on the meta device; of some results, devices choose their own."""
    if (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == (view.size, view.stride, view.offset):
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride)) if tensor.numel() else 0
    flat = torch.empty(view.offset + extent, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(view.size, view.stride, view.offset).copy_(tensor)
    return flat


def ordered(touched: Sequence[set[int]], is_random: Sequence[bool]) -> list[int]:
    """Return an order of operations in which few contents are alive at a time. On each, and of random ones, it stays.

    An operation runs after the last random one that it depends on; if on none, before the first that depends on it.
    """
    newest: dict[int, int] = {}
    after: list[list[int]] = [[] for _ in touched]
    turns: list[int] = []  # the number of that random one; -1: there is none
    for at, numbers in enumerate(touched):
        before = {newest[number] for number in numbers if number in newest}
        for earlier in before:
            after[earlier].append(at)
        newest |= dict.fromkeys(numbers, at)
        turns.append(at if is_random[at] else max((turns[earlier] for earlier in before), default=-1))
    for at in reversed(range(len(turns))):
        if turns[at] < 0:
            turns[at] = min((turns[later] for later in after[at]), default=at)
    return sorted(range(len(turns)), key=lambda at: (turns[at], at))


def materialize(world: Collectives, recording: Recording, owners: Sequence[Owner], shards_on: torch.device) -> None:
    """Replay the body on all ranks, with rank 0's random numbers, and give the owners their values. A collective.

    Once the last operation on a tensor has run, each rank keeps its shard, and frees the rest.

    Raises:
        SpecError: the body did something else on another rank.
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    found = "did something else in world.empty_init() than rank 0."
    hint = "build the same model on every rank; seed Python's random and NumPy alike"
    require_same(world, recording.digest(), found, hint)
    before = rng.of_device(recording.device)
    states = [one.begins_at for one in recording.operations if isinstance(one.begins_at, torch.Tensor)]
    of_main, *states = world.broadcast([recording.generator, *states])
    replay, by_number = Replay(recording.device), defaultdict[int, list[Owner]](list)
    for owner in owners:
        by_number[recording.view(owner[2]).number].append(owner)

    def give(number: int) -> None:
        """Give the owners of a content their tensors, those that are tied the same one, and free it."""
        made: dict[int, torch.Tensor] = {}
        if by_number[number]:  # the same on all ranks, also where their processors compute differently
            broadcast_storage(replay.storages[number], world.device)
        for module, name, tensor in by_number[number]:
            if id(tensor) not in made:
                whole = replay.tensor(recording.view(tensor))
                made[id(tensor)] = _made(whole, tensor, getattr(module, name), shards_on)
            setattr(module, name, made[id(tensor)])
        del replay.storages[number]

    end = _run(replay, recording, iter(states), give)
    world.synchronize()
    is_untouched = torch.equal(before, recording.generator) and torch.equal(recording.generator, of_main)
    rng.set_of_device(recording.device, before if end is None or not is_untouched else end)


def _run(
    replay: Replay, recording: Recording, states: Iterator[torch.Tensor], give: Callable[[int], None]
) -> torch.Tensor | None:
    """Run all operations, and give each content after its last one.

    Args:
        states: those that the body had set the generator to, in order.

    Returns:
        The generator's state at the end of the body; None if the body had set that itself.
    """
    operations, device = recording.operations, recording.device
    wanted = {recording.ends_after, *(one.begins_at for one in operations if isinstance(one.begins_at, int))}
    after: dict[int | None, torch.Tensor] = {}
    touched = [one.touched() for one in operations]
    turns = ordered(touched, [one.is_random for one in operations])
    last = {number: at for at in turns for number in touched[at]}
    for at in turns:
        begins_at = operations[at].begins_at
        if begins_at is not None:
            rng.set_of_device(device, next(states) if isinstance(begins_at, torch.Tensor) else after[begins_at])
        replay.run(operations[at])
        if at in wanted:
            after[at] = rng.of_device(device)
        for number in sorted(touched[at]):
            if last[number] == at:
                give(number)
    return after.get(recording.ends_after)


def _made(whole: torch.Tensor, was: torch.Tensor, now: Any, shards_on: torch.device) -> torch.Tensor:
    """What an owner gets: the tensor; or this rank's shard, if `fully_shard` has made its parameter a DTensor."""
    value = whole
    if is_sharded(now):
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            shard = distribute_tensor(whole, now.device_mesh, now.placements, src_data_rank=None).to_local()
            value = torch.empty_like(now, device=shards_on)
            local_part(value).copy_(shard)
    if isinstance(was, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=was.requires_grad)
        value.__dict__.update(was.__dict__)  # what the user has noted there
    return value
