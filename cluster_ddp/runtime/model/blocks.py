"""The layers that a model repeats: which they are, and activation checkpointing of each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from cluster_ddp.errors import SpecError

Blocks = type[torch.nn.Module] | tuple[type[torch.nn.Module], ...]


def find(model: torch.nn.Module, blocks: Blocks | None, strategy: str) -> list[torch.nn.Module]:
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


def checkpoint_activations(blocks: list[torch.nn.Module]) -> None:
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
