"""The strategies of `World.wrap`: DistributedDataParallel, or FSDP2 over all ranks or over each node."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.console import say
from cluster_ddp.runtime.model import ddp
from cluster_ddp.runtime.model.blocks import Blocks, checkpoint_activations, find
from cluster_ddp.runtime.model.empty_init import recorder, replay
from cluster_ddp.runtime.model.sharded_tensor import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Sharded = Literal["fsdp", "hsdp"]
Strategy = Literal["ddp", "fsdp", "hsdp"]

_OF_FSDP = (
    *("mixed", "mesh", "mp_policy", "reshard_after_forward"),
    *("offload_policy", "shard_placement_fn", "ignored_params"),
)


def wrapped(
    world: Collectives,
    model: torch.nn.Module,
    strategy: Strategy,
    *,
    blocks: Blocks | None = None,
    activation_checkpointing: bool = False,
    sync_batchnorm: bool = False,
    place: bool = True,
    mixed: torch.dtype | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Wrap a model as `World.wrap` describes, with its errors."""
    _check(model, strategy, {"mixed": mixed, "mesh": mesh, "place": None if place else place, **options})
    if strategy != "ddp":
        from cluster_ddp.runtime.model import fsdp

        fsdp.check(options, mixed=mixed)
    if sync_batchnorm:
        model = _with_sync_batchnorm(model, world)
    needs_blocks = strategy != "ddp" or activation_checkpointing
    layers = find(model, blocks, strategy) if needs_blocks else []
    if activation_checkpointing:
        checkpoint_activations(layers)
    unmade = replay.owners(model, recorder.recordings).values()
    shards_on = world.device
    if strategy != "ddp":
        fsdp.check_parameters(model, layers, options)
        fsdp.broadcast_weights(model, world)
        fsdp.shard(model, layers, fsdp.mesh_for(strategy, world, mesh), mixed=mixed, options=options)
        shards_on = fsdp.shards_on(world.device, options)
    for recording, by_storage in unmade:
        replay.materialize(world, recording, by_storage, shards_on)
    if strategy != "ddp":
        return model
    return ddp.wrap(model, world.device, place=place, options=options, synchronize=world.synchronize)


def _check(model: torch.nn.Module, strategy: Strategy, options: Mapping[str, object]) -> None:
    """Refuse an unknown strategy, a wrapped model, and options of another strategy that are given (not None)."""
    if strategy not in (legal := get_args(Strategy)):
        found = f"there is no such strategy.{nearest(strategy, legal)}"
        raise SpecError(f"world.wrap(model, strategy={strategy!r}):", found, f"one of {', '.join(legal)}")
    if isinstance(model, DistributedDataParallel) or any(map(is_sharded, model.parameters())):
        raise SpecError("world.wrap(model):", f"it is wrapped already: {type(model).__name__}.", "wrap it once")
    others, owners = (_OF_FSDP, '"fsdp" and "hsdp"') if strategy == "ddp" else (("place", *_of_ddp()), '"ddp"')
    for name in [name for name in others if options.get(name) is not None]:
        hint = "with world.autocast():  # around the forward pass" if name in ("mixed", "mp_policy") else "leave it out"
        raise SpecError(f"world.wrap(model, {name}=…):", f'it is for strategy={owners}, not "{strategy}".', hint)


def _of_ddp() -> list[str]:
    return [name for name in inspect.signature(DistributedDataParallel).parameters if name not in ("module", *_OF_FSDP)]


def _with_sync_batchnorm(model: torch.nn.Module, world: Collectives) -> torch.nn.Module:
    """The model with SyncBatchNorm, which torch has for GPUs only."""
    if world.device.type != "cpu":
        converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    if world.is_main:
        say("SyncBatchNorm needs GPUs: on CPUs each rank's BatchNorm uses its own batch.")
    return model
