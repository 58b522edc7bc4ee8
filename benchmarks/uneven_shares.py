"""What uneven shares cost: `torchrun --nproc-per-node 3 benchmarks/uneven_shares.py`.

Updates of 512 samples on three ranks (171, 171 and 170) against updates of 510 (170 on each): samples per second, at
once and in batches of at most 64. And of 8 samples (3, 3, 2) against 9. The ways take turns of a few updates.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from record import Figure, report
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.mnist.model import SmallNet


class Case(NamedTuple):
    """Two sizes of an update. The ranks share the second one evenly."""

    uneven: int
    even: int
    batch_size: int | None


CASES = (Case(512, 510, None), Case(512, 510, 64), Case(8, 9, None))


class Training:
    """The MNIST training's small CNN, trained on noise in updates of one size."""

    def __init__(self, world: cluster_ddp.World, samples: int, batch_size: int | None, updates: int) -> None:
        self.world = world
        self.model = world.wrap(SmallNet())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        size = samples * updates
        data = TensorDataset(torch.randn(size, 1, 28, 28), torch.zeros(size, dtype=torch.int64))
        self.shard = world.shard(data, global_batch=samples, batch_size=batch_size, shuffle_seed=1)
        self.samples_per_s()  # warms up

    def samples_per_s(self) -> float:
        """Train an epoch; return the samples per second of all ranks together."""
        self.world.barrier()
        start_s = time.perf_counter()
        for images, labels in self.shard:
            with self.world.accumulate(self.model, self.shard) as is_last:
                (F.nll_loss(self.model(images), labels) * self.shard.loss_scale).backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.world.barrier()
        return self.shard.size / (time.perf_counter() - start_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=8, help="updates in a turn (default: %(default)s)")
    options = parser.parse_args()
    with cluster_ddp.distributed(cuda=False) as world:
        found = [figure for case in CASES for figure in figures(world, case, options.rounds, options.updates)]
        if world.is_main:
            report(*found)


def figures(world: cluster_ddp.World, case: Case, rounds: int, updates: int) -> list[Figure]:
    """The figures of one case: first of the even shares, then of the uneven ones against them."""
    even, uneven = (Training(world, samples, case.batch_size, updates) for samples in (case.even, case.uneven))
    turns = [(even.samples_per_s(), uneven.samples_per_s()) for _ in range(rounds)]
    ranks, cores = world.world_size, len(os.sched_getaffinity(0))
    at_best = case.uneven / ranks / -(-case.uneven // ranks)
    how = f", at most {case.batch_size} at once" if case.batch_size else ""
    limit = f"{at_best:.3f} with a core for each rank (here {cores} cores for {ranks} ranks)"
    return [
        Figure(what=f"updates of {case.even}{how}", values=[one for one, _ in turns], unit="samples/s"),
        Figure(
            what=f"updates of {case.uneven}{how}",
            values=[other for _, other in turns],
            unit="samples/s",
            ratios=[other / one for one, other in turns],
            peer=f"updates of {case.even}, even shares",
            limit=limit,
        ),
    ]


if __name__ == "__main__":
    main()
