"""Which of a few ways to do the same is the fastest here: tried out, since it differs from machine to machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from cluster_ddp.runtime.world import World

_WARM_UP, _ROUNDS = 2, 7


def fastest(world: World, ways: Mapping[str, Callable[[], object]]) -> tuple[str, dict[str, float]]:
    """Time the ways alternately. All ranks do so at once, and go by the slowest of them. A collective.

    Args:
        world: of the ranks.
        ways: by name; each leaves everything that matters as it was (random numbers may be drawn).

    Returns:
        The name of the fastest way, the same on all ranks, and the seconds that each takes.
    """
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for way in ways.values():
            for _ in range(_WARM_UP):
                way()
        rounds = [{name: _seconds(way, world) for name, way in ways.items()} for _ in range(_ROUNDS)]
    mine = {name: statistics.median(one[name] for one in rounds) for name in ways}
    ranks = world.gather(mine)
    slowest = {name: max(rank[name] for rank in ranks) for name in ways}
    return min(slowest, key=slowest.__getitem__), slowest


def _seconds(way: Callable[[], object], world: World) -> float:
    world.synchronize()
    start = time.perf_counter()
    way()
    world.synchronize()
    return time.perf_counter() - start
