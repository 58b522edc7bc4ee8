"""The learning rate of a training on several ranks: scaling with the global batch, and warm-up."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.world import World

Rule = Literal["linear", "sqrt"]


def lr_scale(world: World, per_gpu_batch: int, base_batch: int, rule: Rule = "linear") -> float:
    """Return the factor for a learning rate that was chosen for another global batch.

    Args:
        world: all ranks.
        per_gpu_batch: samples per rank and step.
        base_batch: the global batch that the learning rate was chosen for.
        rule: "linear" (Goyal et al. 2017, arXiv:1706.02677), or "sqrt", for Adam (Malladi et al. 2022,
            arXiv:2205.10287).

    Returns:
        world_size x per_gpu_batch / base_batch, or its square root.

    Raises:
        SpecError: a batch below 1, or another rule.
    """
    for name, value in (("per_gpu_batch", per_gpu_batch), ("base_batch", base_batch)):
        if value < 1:
            asked = f"Scaling the learning rate with {name}={value}:"
            raise SpecError(asked, "a batch has 1 or more samples.", f"{name}=64")
    ratio = world.world_size * per_gpu_batch / base_batch
    if rule == "linear":
        return ratio
    if rule == "sqrt":
        return math.sqrt(ratio)
    raise SpecError(f"Scaling the learning rate by rule={rule!r}:", "there is no such rule.", '"linear" or "sqrt"')


def with_warmup(optimizer: Optimizer, scheduler: LRScheduler, *, steps: int, start: float = 0.01) -> LRScheduler:
    """Return a scheduler that raises the learning rate linearly, then hands over to another one.

    A large global batch needs it: with the scaled learning rate from the first step a training may diverge (Goyal et
    al. 2017). Call its `step` after each step of the optimizer.

    Args:
        optimizer: the optimizer of both.
        scheduler: takes over after the warm-up, with its own count of steps from 0.
        steps: steps of the optimizer in the warm-up.
        start: factor on the learning rate at the first step.

    Raises:
        SpecError: `steps` is below 1.
    """
    if steps < 1:
        raise SpecError(f"Warming up for {steps} steps:", "a warm-up has 1 or more.", "leave it out")
    return SequentialLR(optimizer, [LinearLR(optimizer, start, total_iters=steps), scheduler], milestones=[steps])
