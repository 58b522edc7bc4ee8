"""How the ranks agree on the step to stop after, at little cost."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from cluster_ddp.runtime.world import World

# How often the ranks exchange their flags. A flag takes two exchanges: the first one takes it along, the second one
# collects what the first one found.
AGREE_EVERY_S = 0.5
# Where that is too often for gloo (its ring takes longer, the more ranks there are), up to this. Twice as long, and a
# save, must fit into the time between a warning and the end: KillWait is 30 s by default.
_AT_MOST_EVERY_S = 4.0
_IS_WAITING_S = 0.1
_MAX_STEPS = 128  # steps that suddenly take longer must not make it wait for ever


class StopAgreement:
    """How the ranks agree: every so many steps one small all-reduce on the CPU, which runs beside the next steps.

    The number of steps follows from how long they take, which the ranks exchange too, so that it is the same on all.

    Args:
        world: of the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps_left = self._interval = 1
        self._steps = self._steps_begun = 0
        self._every_s, self._waited_s = AGREE_EVERY_S, 0.0
        self._since = time.monotonic()
        # What is under way, and of how many steps its seconds are.
        self._work: dist.Work | None = None
        self._values, self._made = torch.empty(0), 0

    def is_due(self) -> bool:
        """To be called once a step, by all ranks alike: whether to `collect` and `begin` now."""
        self._steps += 1
        self._steps_left -= 1
        return self._steps_left <= 0

    def collect(self, *flags: bool) -> list[bool]:
        """Whether any rank had each of the flags when all began; if nothing is under way, those of now. A collective.

        Args:
            flags: this rank's, as they are now; always as many.

        Raises:
            RuntimeError: gloo's, of a rank that did not answer in time or is gone.
        """
        if self._world.world_size == 1:
            return list(flags)
        if self._work is None:
            self.begin(*flags)
        assert self._work is not None
        start = time.monotonic()
        self._work.wait()
        self._work, self._waited_s = None, time.monotonic() - start
        *found, slowest_s, waited_s = self._values.tolist()
        self._plan(slowest_s, waited_s)
        return [value > 0 for value in found]

    def begin(self, *flags: bool) -> None:
        """Begin to exchange this rank's flags, as they are now. A collective."""
        if self._world.world_size == 1:
            return
        now = time.monotonic()
        self._made, self._steps_begun = self._steps - self._steps_begun, self._steps
        values = [*map(float, flags), now - self._since - self._waited_s, self._waited_s]
        self._values, self._since = torch.tensor(values, dtype=torch.float64), now
        self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> None:
        """Collect what is under way, before the ranks part. A collective."""
        if self._work is not None:
            self.collect()

    def _plan(self, slowest_s: float, waited_s: float) -> None:
        """Decide after how many steps the next exchange is, from what the slowest rank took for the last ones."""
        too_often = waited_s > _IS_WAITING_S
        self._every_s = min(2 * self._every_s, _AT_MOST_EVERY_S) if too_often else AGREE_EVERY_S
        if self._made > 0:
            # Twice as many steps at most: the first ones may have been quick by chance.
            steps = int(self._made * self._every_s / max(slowest_s, 1e-9))
            self._interval = max(1, min(steps, 2 * self._interval, _MAX_STEPS))
        self._steps_left = self._interval
