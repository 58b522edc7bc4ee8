"""The strategies of `World.wrap`: DistributedDataParallel, or FSDP2 over all ranks or over each node.

They gather the layers that a model repeats one after the other, or checkpoint the activations of each.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.console import say
from cluster_ddp.runtime.model import ddp, empty_init
from cluster_ddp.runtime.model.dtensor_pieces import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Blocks = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...]
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
    layers = _find(model, blocks, strategy) if needs_blocks else []
    if activation_checkpointing:
        _checkpoint_activations(layers)
    withheld = empty_init.withhold(world, model)
    if withheld and not place:
        found = "a model of world.empty_init() is nowhere on other ranks than rank 0."
        raise SpecError("world.wrap(model, place=False):", found, "build it outside of world.empty_init()")
    shards_on = world.device
    if strategy != "ddp":
        shards_on = fsdp.shard(model, layers, world, strategy, mesh=mesh, mixed=mixed, options=options)
    empty_init.hand_out(world, withheld, shards_on)
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


def _find(model: torch.nn.Module, blocks: Blocks | None, strategy: str) -> list[torch.nn.Module]:
    """Return the modules of a model that are of these classes, outer ones first.

    Raises:
        SpecError: none given, or none found. It names the class of the layers that the model repeats.
    """
    asked = f"world.wrap(model, strategy={strategy!r}):"
    classes = blocks if isinstance(blocks, tuple) else (blocks,) if blocks is not None else ()
    wrong = [one for one in classes if not _has_forward(one)]
    if wrong:
        why = f"blocks={wrong[0]!r} is not a class of modules with a forward()."
        raise SpecError(asked, why, "blocks=Block, or a tuple of classes")
    found = [module for module in model.modules() if isinstance(module, classes)]
    if not found:
        names = " or ".join(one.__name__ for one in classes)
        why = f"the model has no {names}." if classes else "blocks is missing: the classes of the layers it repeats."
        hint = repeated_class(model) or f"{type(model).__name__}, to gather the whole model at once"
        raise SpecError(asked, why, f"blocks={hint}")
    return found


def _has_forward(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, torch.nn.Module) and one.forward is not torch.nn.Module.forward


def repeated_class(model: torch.nn.Module) -> str | None:
    """Return the name of the class that has most of the parameters in a model's lists of layers; None without lists."""
    sizes = Counter[str]()
    for layers in model.modules():
        if isinstance(layers, (torch.nn.ModuleList, torch.nn.Sequential)):
            for layer in layers:
                sizes[type(layer).__name__] += sum(one.numel() for one in layer.parameters())
    return next((name for name, numel in sizes.most_common(1) if numel), None)


def _checkpoint_activations(blocks: list[torch.nn.Module]) -> None:
    """Let each block's forward pass be computed again in the backward pass, instead of keeping what it computed.

    A block gets a class of its own, as by FSDP2: the names of parameters stay, and copies of the block are right.
    """
    for block in blocks:
        kind = type(block)
        block.__class__ = type(f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {"__module__": kind.__module__})


class _Checkpointed(torch.nn.Module):
    """Before a block's class: computes its forward pass again in the backward pass."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the block's own does."""
        return checkpoint(super().forward, *inputs, use_reentrant=False, **options)
