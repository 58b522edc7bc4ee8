"""How the ranks agree on the step to stop after, at little cost."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from cluster_ddp.runtime.world import World

# How often the ranks exchange their flags. Each exchange costs about a millisecond; a step, once begun, is not stopped.
EXCHANGE_EVERY_S = 1.0
_MAX_STEPS = 128  # steps that suddenly take longer must not make it wait for ever


class Exchange:
    """How the ranks agree: every so many steps one small all-reduce, on the CPU.

    The number of steps follows from how long they take, which the ranks exchange too, so that it is the same on all.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps_left = self._interval = 1
        self._since = time.monotonic()

    def is_due(self) -> bool:
        """To be called once a step, by all ranks alike: whether the flags are exchanged now."""
        self._steps_left -= 1
        return self._steps_left <= 0

    def any(self, *flags: bool) -> list[bool]:
        """Whether any rank has each of the flags. A collective."""
        taken_s = time.monotonic() - self._since
        values = torch.tensor([*map(float, flags), taken_s], dtype=torch.float64)
        if self._world.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        *found, slowest_s = values.tolist()
        # Twice as many steps at most: the first ones may have been quick by chance.
        made = self._interval - max(self._steps_left, 0)
        steps = int(made * EXCHANGE_EVERY_S / max(slowest_s, 1e-9))
        self._interval = self._steps_left = max(1, min(steps, 2 * self._interval, _MAX_STEPS))
        self._since = time.monotonic()
        return [value > 0 for value in found]
