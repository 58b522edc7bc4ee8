"""Each rank's share of a dataset, batch by batch, nothing lost and nothing twice.

The order of an epoch's samples is a function of seed and epoch alone. It is cut into global batches of world_size x
batch_size samples, of which every rank takes each world_size-th sample. So all ranks make the same number of steps, and
what a global batch holds does not depend on how many ranks share it. (DistributedSampler pads instead: it repeats
samples.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cluster_ddp.errors import DataError


class GlobalBatches(Sampler[list[int]]):
    """The sample indices of one rank, a list per step.

    Args:
        size: samples in the dataset.
        batch_size: samples a step on each rank.
        rank: this rank.
        world_size: number of ranks.
        seed: of the shuffle; None for the dataset's own order.
    """

    def __init__(self, size: int, batch_size: int, *, rank: int, world_size: int, seed: int | None) -> None:
        if batch_size < 1:
            raise DataError(f"Batches of {batch_size} samples:", "a batch holds 1 or more.", "--batch-size 64")
        self.size, self.rank, self.world_size, self.seed = size, rank, world_size, seed
        self.epoch = 0
        global_batch = batch_size * world_size
        starts = list(range(0, size, global_batch))
        # The last global batch needs a sample for every rank; what is less joins the one before it.
        if len(starts) > 1 and size - starts[-1] < world_size:
            starts.pop()
        self.bounds = list(zip(starts, [*starts[1:], size]))

    def order(self) -> torch.Tensor:
        """All sample indices in this epoch's order: int64, shape (size,)."""
        if self.seed is None:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.epoch))
        return torch.randperm(self.size, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start, stop in self.bounds:
            share = order[start + self.rank : stop : self.world_size].tolist()
            if share:  # a dataset smaller than the world leaves ranks without
                yield share

    def __len__(self) -> int:
        return len(self.bounds)


class Shard:
    """Iterates over this rank's batches; made by `World.shard`.

    Every pass over it is one epoch of `set_epoch`; without that, the order is the same each time.
    """

    def __init__(self, dataset: Dataset[Any], batches: GlobalBatches, **loader_options: Any) -> None:
        self.batches = batches
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **loader_options)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch."""
        self.batches.epoch = epoch

    def mean_batch(self, step: int) -> float:
        """Samples per rank at a step, averaged over the ranks: a summed loss divided by it weighs all samples alike."""
        start, stop = self.batches.bounds[step]
        return (stop - start) / self.batches.world_size

    def samples_seen(self, step: int) -> int:
        """Samples that all ranks together have seen after a step of the epoch."""
        return self.batches.bounds[step][1]

    @property
    def size(self) -> int:
        """Samples in the whole dataset."""
        return self.batches.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        """Steps per epoch, the same on all ranks."""
        return len(self.batches)


def stream_seed(seed: int, stream: int) -> int:
    """A seed of its own for each stream (epoch, rank …) of a run: 0 … 2**63 - 1.

    The mixing function of splitmix64 (Steele, Lea, Flood 2014), so that neighbouring seeds and streams share nothing.
    """
    x = (seed * 0x9E3779B97F4A7C15 + stream + 1) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1
