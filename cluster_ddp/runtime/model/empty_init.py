"""`World.empty_init`: rank 0 runs a model's constructor, the others without memory for its weights. `wrap` shares them.

On the other ranks, weights are on torch's meta device: they have a shape, and no values.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as torch_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it under this name, for extending torch
from torch.utils._pytree import tree_leaves, tree_map_only

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.model.dtensor_pieces import broadcast_storage, is_sharded, local_part
from cluster_ddp.runtime.profiling.cpu_and_memory import available_bytes

_META = torch.device("meta")
_ASKED = "Building a model in world.empty_init():"
_WRAPPING = "world.wrap(model):"
_OUTSIDE = "build that part of the model outside of the body"
# Their results do not follow from their arguments.
_FACTORIES = {
    *(torch.empty, torch.empty_permuted, torch.empty_strided),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}


@contextmanager
def built_on_main(world: Collectives) -> Iterator[None]:
    """Build models in the body as `World.empty_init` describes, with its errors. A collective."""
    device = torch.get_default_device()
    before = rng.of_device(device)
    with ExitStack() as stack:
        on_registration: Any = _check_room if world.is_main else _WithoutValue()
        stack.callback(torch_hooks.register_module_parameter_registration_hook(on_registration).remove)
        modes: Any = (_RoomForCopies,) if world.is_main else (_WithoutValues, _Factories)
        for mode in modes:
            stack.enter_context(mode())
        yield
    of_main, after = world.broadcast([before, rng.of_device(device)])
    was_set = not torch.equal(rng.of_device(device), before)  # as by torch.manual_seed: no rank draws but rank 0
    if was_set or torch.equal(before, of_main):
        rng.set_of_device(device, after)


def _check_room(_: torch.nn.Module | None, name: str, tensor: torch.Tensor | None) -> None:
    """Refuse a tensor that this host has no memory for, before it is written.

    Raises:
        SpecError: with the numbers.
    """
    if tensor is None or tensor.device.type != "cpu":
        return
    if tensor.nbytes > (room := available_bytes()):
        found = f"rank 0 builds the whole model in its host's memory. It has {_gb(room)} left. {name} needs "
        hint = "--mem for more; cluster-ddp memory FILE:FUNCTION shows what a model takes"
        raise SpecError(_ASKED, f"{found}{_gb(tensor.nbytes)}.", hint)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


class _RoomForCopies(TorchDispatchMode):
    """Refuses copies, as deepcopy makes of layers, that this host has no memory for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            _check_room(None, "a copy", args[0])
        return func(*args, **(kwargs or {}))


class _WithoutValue:
    """Puts each parameter that a module registers on the meta device; one that several modules have stays one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], torch.nn.Parameter]] = {}

    def __call__(self, _: torch.nn.Module, __: str, parameter: Any) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        earlier, made = self._made.get(id(parameter), (lambda: None, None))
        if earlier() is not parameter or made is None:
            made = _stand_in(parameter, _layout(parameter))
            self._made[id(parameter)] = weakref.ref(parameter), made
        return made


class _Factories(TorchFunctionMode):
    """Makes empty and random tensors on the meta device. What follows from numbers has values: torch.linspace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("generator") is None:
            kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)


class _WithoutValues(TorchDispatchMode):
    """Computes with tensors of the meta device there, and refuses to draw random numbers: other ranks draw less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_leaves([args, kwargs]) if isinstance(one, torch.Tensor)]
        if any(one.is_meta for one in tensors):
            return self._computed(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and kwargs.get("device") != _META and kwargs.get("generator") is None:
            hint = "torch.empty(…).normal_() or torch.randn(…), or initialize the weight once the module has it"
            raise SpecError(_ASKED, f"{func} draws random numbers into a tensor that has values.", hint)
        return func(*args, **kwargs)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("generator") is not None:  # it would stay where it is, on these ranks alone
            raise SpecError(_ASKED, f"{func} draws from a generator of its own.", "torch.manual_seed instead")
        for argument, given in zip(func._schema.arguments, args):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(given, torch.Tensor) and not given.is_meta:
                raise SpecError(_ASKED, f"{func} writes values of a weight into a real tensor.", _OUTSIDE)
        args, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(_META), (args, kwargs))
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            hint = "leave out .item(), .cpu(), .to(device): world.wrap moves the model; or " + _OUTSIDE
            raise SpecError(_ASKED, f"ranks other than 0 have no values of weights. {func}: {error}", hint) from error


@dataclass(frozen=True)
class Withheld:
    """A parameter or buffer of a model that only rank 0 has the values of. In the model, it is on the meta device."""

    stand_in: torch.Tensor
    values: torch.Tensor | None
    """On rank 0."""
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    """The modules that have it, and its name there."""


def withhold(world: Collectives, model: torch.nn.Module) -> list[Withheld]:
    """Compare a model over the ranks, and put what has no values on other ranks aside on rank 0. A collective.

    Raises:
        SpecError: some ranks have another model; or rank 0 has a tensor without values.
    """
    tensors = dict(_named(model))
    missing = [name for name, one in tensors.items() if one.is_meta]
    of_ranks = world.gather((_digest(_described(tensors)), _digest(missing), missing if world.rank < 2 else []))
    (of_main, _, without_values), others = of_ranks[0], of_ranks[1:]
    if differing := [str(rank) for rank, one in enumerate(of_ranks) if one[0] != of_main]:
        what = "parameters or buffers of other names, shapes, types or ties than rank 0."
        raise SpecError(_WRAPPING, f"ranks {', '.join(differing)} have {what}", "make the same model on every rank")
    if without_values:
        found = f"{without_values[0]} is on the meta device on rank 0, too: nobody has its values."
        raise SpecError(_WRAPPING, found, "build the whole model in world.empty_init(), without device=")
    if any(one[1] != others[0][1] for one in others):
        found = "some ranks have built the model in world.empty_init(), and others outside."
        raise SpecError(_WRAPPING, found, "build it in the same way on every rank")
    return _put_aside(world, model, {name: tensors[name] for name in (others[0][2] if others else [])})


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """What must be alike on all ranks; also which tensors are one, or share memory."""
    memory = {name: _memory(one) for name, one in tensors.items()}  # kept, so that an id is no other's
    first: dict[int, str] = {}
    return [
        (name, str(one.dtype), one.requires_grad, first.setdefault(id(memory[name]), name), _shape(one))
        for name, one in tensors.items()
    ]


def _memory(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage() if tensor.layout == torch.strided and not is_lazy(tensor) else tensor


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _digest(described: object) -> str:
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _put_aside(world: Collectives, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[Withheld]:
    """Put stand-ins with rank 0's layout in place of these tensors; those that are tied get one."""
    memory = {name: _memory(one) for name, one in tensors.items()}
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        other, earlier = first.setdefault(id(memory[name]), (name, tensor))
        if earlier is not tensor:
            hint = f"make one of them a tensor of its own: {name}.clone()"
            raise SpecError(_WRAPPING, f"{other} and {name} are views of one memory.", hint)
    layouts = world.broadcast([_layout(one) for one in tensors.values()])
    withheld: dict[int, Withheld] = {}
    for (name, tensor), layout in zip(tensors.items(), layouts):
        if id(tensor) not in withheld:
            stand_in = _stand_in(tensor, tuple(layout))
            withheld[id(tensor)] = Withheld(stand_in, tensor.detach() if world.is_main else None)
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, attribute, withheld[id(tensor)].stand_in)
        withheld[id(tensor)].owners.append((owner, attribute))
    return list(withheld.values())


def hand_out(world: Collectives, withheld: list[Withheld], shards_on: torch.device) -> None:
    """Give all ranks rank 0's values, tensor by tensor: each keeps its part, and frees the rest. A collective.

    It empties the list, so that rank 0 frees what it has handed out.

    Raises:
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    while withheld:
        one = withheld.pop(0)
        whole = torch.empty_like(one.stand_in, device=world.device, requires_grad=False)
        if one.values is not None:
            whole.copy_(one.values)
        broadcast_storage(whole.untyped_storage(), world.device)
        owner, name = one.owners[0]
        value = _like(one.stand_in, _shard(whole, getattr(owner, name), shards_on))
        for owner, name in one.owners:
            setattr(owner, name, value)
        world.synchronize()


def _shard(whole: torch.Tensor, now: torch.Tensor, shards_on: torch.device) -> torch.Tensor:
    """This rank's shard, if `fully_shard` has made the parameter a DTensor; else the tensor."""
    if not is_sharded(now):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(now, DTensor)
    with torch.no_grad():
        shard = distribute_tensor(whole, now.device_mesh, now.placements, src_data_rank=None).to_local()
        value = torch.empty_like(now, device=shards_on)
        local_part(value).copy_(shard)
    return value


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy, which has each element once."""
    return torch.empty_like(tensor, device=_META).stride()


def _stand_in(tensor: torch.Tensor, layout: tuple[int, ...]) -> Any:
    """A tensor or parameter without values in place of another."""
    return _like(tensor, torch.empty_strided(tensor.shape, layout, dtype=tensor.dtype, device=_META))


def _like(was: torch.Tensor, tensor: torch.Tensor) -> Any:
    """A parameter with what the user has noted at another one; or the tensor, if the other one is a buffer."""
    if not isinstance(was, torch.nn.Parameter):
        return tensor
    parameter = torch.nn.Parameter(tensor, requires_grad=was.requires_grad)
    parameter.__dict__.update(was.__dict__)
    return parameter
