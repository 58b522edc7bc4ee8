"""A recorded constructor's operations, run again on this rank's device; see `empty_init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.model.empty_init.recording import Operation, Recording, View, found, mapped, order, renamed
from cluster_ddp.runtime.model.sharded_tensor import is_sharded, local_part

_ASKED = "world.wrap(model):"


class Replay:
    """Real tensors in place of those on the meta device, on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.storages: dict[int, torch.UntypedStorage] = {}
        """Those that are alive, by number."""

    def tensor(self, view: View) -> torch.Tensor:
        """Return the tensor that a view describes."""
        return _tensor(self.storages[view.storage], view)

    def run(self, operation: Operation) -> None:
        """Run an operation, and keep the storages that it makes."""
        for number, size in operation.fresh:
            self.storages[number] = torch.UntypedStorage(size, device=self._device)
        arguments, options = mapped(operation.arguments, self._real), mapped(operation.options, self._real)
        with torch.no_grad():
            results = found([operation.function(*arguments, **options)], torch.Tensor)
            for at, view in operation.made:
                self.storages[view.storage] = _laid_out(results[at], view).untyped_storage()

    def _real(self, value: Any) -> Any:
        if isinstance(value, View):
            return self.tensor(value)
        if isinstance(value, torch.Tensor):
            return value.to(self._device) if value.dim() else value
        return self._device if value == torch.device("meta") else value


def _tensor(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)


def _laid_out(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """The tensor in the layout that it had on the meta device; of some results, devices choose their own."""
    if (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == (view.size, view.stride, view.offset):
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size, view.stride)) if tensor.numel() else 0
    flat = torch.empty(view.offset + extent, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(view.size, view.stride, view.offset).copy_(tensor)
    return flat


@dataclass(frozen=True)
class Owner:
    """A module that has a parameter or buffer of the body."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    view: View


def owners(model: torch.nn.Module, recordings: list[Recording]) -> dict[int, tuple[Recording, dict[int, list[Owner]]]]:
    """Return who has which tensor on the meta device, by recording and by its storage there.

    Raises:
        SpecError: one was not made in the body of `World.empty_init`, or was changed after it.
    """
    found: dict[int, tuple[Recording, dict[int, list[Owner]]]] = {}
    for path, module in model.named_modules():
        for name, tensor in _own(module):
            if not tensor.is_meta:
                continue
            full_name = f"{path}.{name}".lstrip(".")
            at = next((at for at, one in enumerate(recordings) if one.number(tensor) is not None), None)
            if at is None:
                why = "is on the meta device and was not made in the body of world.empty_init()."
                raise SpecError(_ASKED, f"{full_name} {why}", "build the whole model there, conversions of dtype, too")
            if recordings[at].changed(tensor):
                why = "was changed after the body of world.empty_init(), where no tensor has values."
                raise SpecError(_ASKED, f"{full_name} {why}", "change it in the body, or after world.wrap")
            view = recordings[at].view(tensor)
            of_recording = found.setdefault(at, (recordings[at], {}))[1]
            of_recording.setdefault(view.storage, []).append(Owner(module, name, tensor, view))
    return found


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def materialize(
    world: Collectives, recording: Recording, by_storage: Mapping[int, list[Owner]], shards_on: torch.device
) -> None:
    """Replay the body on all ranks, with rank 0's random numbers, and give the owners their values. A collective.

    Once the last operation on a tensor has run, each rank keeps its shard, and frees the rest.

    Raises:
        SpecError: the body did something else on another rank.
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    digests = world.gather(recording.digest())
    if other := [rank for rank, one in enumerate(digests) if one != digests[0]]:
        found = f"ranks {', '.join(map(str, other))} did something else in world.empty_init() than rank 0."
        raise SpecError(_ASKED, found, "build the same model on every rank; seed Python's random and NumPy alike")
    before = rng.of_device(recording.device)
    states = world.broadcast([recording.generator, *_states(recording)])
    operations, final = renamed(recording)
    owned = {final[number]: of_storage for number, of_storage in by_storage.items()}
    replay = Replay(recording.device)

    def give(number: int) -> None:
        _give(world, replay.storages[number], owned.get(number, []), shards_on)

    after = _run(replay, recording, operations, states[1:], give)
    world.synchronize()
    is_untouched = torch.equal(before, recording.generator) and torch.equal(recording.generator, states[0])
    goes_on = recording.ends_after is not None and is_untouched
    rng.set_of_device(recording.device, after[recording.ends_after] if goes_on else before)


def _states(recording: Recording) -> list[torch.Tensor]:
    """The generator's states that the body had set, in order."""
    return [one.begins_at for one in recording.operations if isinstance(one.begins_at, torch.Tensor)]


def _run(
    replay: Replay,
    recording: Recording,
    operations: list[Operation],
    states: list[torch.Tensor],
    give: Callable[[int], None],
) -> dict[int | None, torch.Tensor]:
    """Run all operations; give each storage after its last one, and free it.

    Returns the generator's states after those random operations that something begins after.
    """
    given, after, newest, device = iter(states), dict[int | None, torch.Tensor](), None, recording.device
    wanted, turns = {recording.ends_after, *_returns(operations)}, order(operations)
    last = {number: at for at in turns for number in operations[at].storages()}
    for at in turns:
        operation = operations[at]
        if isinstance(operation.begins_at, torch.Tensor):
            rng.set_of_device(device, next(given))
        elif operation.is_random and operation.begins_at != newest:
            rng.set_of_device(device, after[operation.begins_at])
        replay.run(operation)
        newest = at if operation.is_random else newest
        if at in wanted:
            after[at] = rng.of_device(device)
        for number in sorted(operation.storages()):
            if last[number] == at:
                give(number)
                del replay.storages[number]
    return after


def _returns(operations: list[Operation]) -> Iterator[int]:
    """The random operations to whose end the generator was set back, as torch.random.fork_rng does."""
    newest = None
    for at, operation in enumerate(operations):
        if operation.is_random:
            if isinstance(operation.begins_at, int) and operation.begins_at != newest:
                yield operation.begins_at
            newest = at


def _give(world: Collectives, storage: torch.UntypedStorage, of_storage: list[Owner], shards_on: torch.device) -> None:
    """Give the owners of a storage their tensors; those that are tied get one."""
    made: dict[int, torch.Tensor] = {}
    if of_storage:  # the same on all ranks, also where their processors compute differently
        broadcast_storage(storage, world.device)
    for owner in of_storage:
        if id(owner.tensor) not in made:
            made[id(owner.tensor)] = _made(_tensor(storage, owner.view), owner, shards_on)
        setattr(owner.module, owner.name, made[id(owner.tensor)])


def _made(whole: torch.Tensor, owner: Owner, shards_on: torch.device) -> torch.Tensor:
    """What an owner gets: the tensor; or this rank's shard, if `fully_shard` has made its parameter a DTensor."""
    now = getattr(owner.module, owner.name)
    value = whole
    if is_sharded(now):
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            shard = distribute_tensor(whole, now.device_mesh, now.placements, src_data_rank=None).to_local()
            value = torch.empty_like(now, device=shards_on)
            local_part(value).copy_(shard)
    if isinstance(owner.tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=owner.tensor.requires_grad)
        value.__dict__.update(owner.tensor.__dict__)  # what the user has noted there
    return value


def broadcast_storage(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Give all ranks rank 0's bytes. A collective."""
    its_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    value = its_bytes.to(device)
    dist.broadcast(value, src=0)
    if value is not its_bytes:
        its_bytes.copy_(value)
