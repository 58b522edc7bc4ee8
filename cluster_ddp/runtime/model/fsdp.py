"""A model in torch's FSDP2 (`fully_shard`): each rank keeps a part of every parameter, gradient and optimizer state.

Each block's parameters are gathered before its forward and backward pass and freed afterwards, so that one block is
whole at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from cluster_ddp.errors import SpecError, check_options
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.model.dtensor_pieces import broadcast_storage
from cluster_ddp.slurm.variables import node_name

_CALL = "world.wrap(model, {}=…)"
_CHOSEN = {
    "module": ("world.wrap chooses it.", "leave it out"),
    "dp_mesh_dims": ("tensor parallelism is not built.", "mesh=DeviceMesh of one dimension, or of two for HSDP"),
}


def check(options: Mapping[str, Any], *, mixed: torch.dtype | None) -> None:
    """Check the options of `World.wrap` for `fully_shard`.

    Raises:
        SpecError: it does not have one; or two contradict each other.
    """
    check_options(options, _CALL, fully_shard, chosen=_CHOSEN)
    if mixed is not None and "mp_policy" in options:
        raise SpecError(_asked("mp_policy"), f"mixed={mixed} makes one, too.", "give one of the two")
    if mixed is not None and not mixed.is_floating_point:
        raise SpecError(_asked("mixed"), f"{mixed} has no fractions.", "mixed=torch.bfloat16")


def shard(
    model: torch.nn.Module,
    blocks: list[torch.nn.Module],
    world: Collectives,
    strategy: str,
    *,
    mesh: DeviceMesh | None,
    mixed: torch.dtype | None,
    options: Mapping[str, Any],
) -> torch.device:
    """Shard a model in place, with rank 0's weights: each block, then the rest. A collective.

    Returns where the shards are between steps.

    Raises:
        SpecError, DeviceTimeoutError, PeerFailedError: as `World.wrap`.
    """
    _check_parameters(model, blocks, set(options.get("ignored_params") or ()))
    _broadcast_weights(model, world)
    given = {**options, "mesh": _mesh_for(strategy, world, mesh)}
    if mixed is not None:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32)
    noted = {name: dict(vars(one)) for name, one in model.named_parameters(remove_duplicate=False)}
    for module in [model, *(block for block in blocks if block is not model)][::-1]:  # inner ones first
        fully_shard(module, **given)
    for name, one in model.named_parameters(remove_duplicate=False):
        vars(one).update(noted[name])  # what a script has noted at a parameter, as for groups of an optimizer
    model.register_forward_hook(_reshard)
    return torch.device("cpu") if isinstance(options.get("offload_policy"), CPUOffloadPolicy) else world.device


def _reshard(model: torch.nn.Module, *_: object) -> None:
    """After a forward pass without gradients, free what torch keeps whole for the backward pass.

    Until then, `parameters()` gives whole tensors without the gradients and shards: an optimizer that is made of them,
    a clipping or an average would change nothing.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _check_parameters(model: torch.nn.Module, blocks: list[torch.nn.Module], ignored: set[torch.nn.Parameter]) -> None:
    """Refuse what torch refuses without a cure, in the first step, or (tied weights, torch 2.10) not at all."""
    asked = "world.wrap(model):"
    dtypes: dict[torch.nn.Module, dict[torch.dtype, str]] = {}
    first: dict[torch.nn.Parameter, tuple[torch.nn.Module, str]] = {}
    for block, name, one in _by_block(model, blocks):
        if one in ignored:
            continue
        if one.dim() == 0:
            hint = "give it one dimension: torch.nn.Parameter(torch.ones(1))"
            raise SpecError(asked, f"{name} is a scalar, which can't be sharded.", hint)
        if not one.is_contiguous():
            hint = "parameter.data = parameter.data.contiguous()"
            raise SpecError(asked, f"{name} is not contiguous (channels_last, or transposed?).", hint)
        if (other := first.setdefault(one, (block, name)))[0] is not block:
            found = f"{other[1]} and {name} are tied, and in different blocks: they would be sharded apart."
            hint = "tie weights within one block, or outside of all; blocks= may name a class that holds both"
            raise SpecError(asked, found, hint)
        if one.requires_grad:
            dtypes.setdefault(block, {})[one.dtype] = name
    if mixed := next((together for together in dtypes.values() if len(together) > 1), None):
        found = " and ".join(f"{name} ({dtype})" for dtype, name in mixed.items())
        hint = "one dtype for all trained weights, and mixed=torch.bfloat16; or make what differs a block of its own"
        raise SpecError(asked, f"one block has parameters of different dtypes: {found}.", hint)
    for name, module in model.named_modules():
        is_table = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_table and module.sparse and module.weight.requires_grad:
            hint = f"{type(module).__name__}(…, sparse=False)"
            raise SpecError(asked, f"{name} has sparse gradients, which can't be sharded.", hint)


def _by_block(
    model: torch.nn.Module, blocks: list[torch.nn.Module]
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """All parameters by all their names, each with the innermost block that has it, or else the model."""
    modules, owners = dict(model.named_modules(remove_duplicate=False)), {model, *blocks}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.split(".")[:-1]
        above = (modules[".".join(path[:count])] for count in range(len(path), -1, -1))
        yield next(one for one in above if one in owners), name, parameter


def _mesh_for(strategy: str, world: Collectives, given: DeviceMesh | None) -> DeviceMesh:
    """The mesh that a strategy shards over; one that the user gave is checked. A collective."""
    kind = world.device.type
    if given is not None:
        mesh = _checked(strategy, world, given)
    elif strategy == "fsdp":
        mesh = DeviceMesh(kind, list(range(world.world_size)), mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh(kind, _rows(world), mesh_dim_names=("replicate", "shard"))
    for dimension in range(mesh.ndim):
        process_group.limit(mesh.get_group(dimension), world.device, timeout_s=world.collective_timeout_s)
    return mesh


def _checked(strategy: str, world: Collectives, mesh: DeviceMesh) -> DeviceMesh:
    wanted = {"fsdp": 1, "hsdp": 2}[strategy]
    if mesh.ndim != wanted:
        found = f'it has {mesh.ndim} dimensions; strategy="{strategy}" shards over {wanted}.'
        hint = 'one dimension for "fsdp", (replicate, shard) for "hsdp"; tensor parallelism is not built'
        raise SpecError(_asked("mesh"), found, hint)
    if mesh.device_type != world.device.type or mesh.size() != world.world_size:
        found = f"it is over {mesh.size()} ranks' {mesh.device_type}, the world over {world.world_size} ranks' "
        hint = f'torch.distributed.init_device_mesh("{world.device.type}", …) over all ranks'
        raise SpecError(_asked("mesh"), f"{found}{world.device.type}.", hint)
    if wanted == 2 and mesh.mesh_dim_names is None:
        hint = 'init_device_mesh(…, mesh_dim_names=("replicate", "shard"))'
        raise SpecError(_asked("mesh"), "its dimensions have no names, which torch needs.", hint)
    return mesh


def _rows(world: Collectives) -> list[list[int]]:
    """The ranks of each node, whatever the order in which the launcher has spread them."""
    nodes: dict[object, list[int]] = {}
    for rank, node in enumerate(world.gather(node_name(os.environ))):
        nodes.setdefault(node, []).append(rank)
    if len(set(map(len, nodes.values()))) > 1:
        found = ", ".join(f"{len(ranks)} on {node}" for node, ranks in nodes.items())
        hint = 'as many on each node: --ntasks-per-node=N; or strategy="fsdp"'
        found = f"the nodes have different numbers of ranks: {found}."
        raise SpecError('world.wrap(model, strategy="hsdp"):', found, hint)
    return list(nodes.values())


def _broadcast_weights(model: torch.nn.Module, world: Collectives) -> None:
    """Give all ranks rank 0's parameters and buffers, one after the other; those on the meta device stay."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {id(one.untyped_storage()): one.untyped_storage() for one in tensors if not one.is_meta}
    for storage in storages.values():
        broadcast_storage(storage, world.device)
        if storage.device != world.device:
            world.synchronize()
    world.synchronize()


def _asked(name: str) -> str:
    return f"{_CALL.format(name)}:"
