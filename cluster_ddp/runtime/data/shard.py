"""Each rank's share of a dataset, batch by batch: no sample is lost or repeated.

The order of an epoch's samples depends on seed and epoch only. It is cut into global batches of world_size x batch_size
samples. From each, a rank takes every world_size-th sample. So all ranks make the same number of steps, and the content
of a global batch does not depend on how many ranks share it. (DistributedSampler repeats samples instead.) The place in
an epoch is a number of samples, so that another number of ranks can resume from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from cluster_ddp.errors import DataError, counted
from cluster_ddp.runtime.data.training_data import TrainingData
from cluster_ddp.runtime.failure import rank_progress
from cluster_ddp.runtime.rng import stream_seed

Order = Callable[[int, int], Sequence[int]]
"""A sampler of one's own: from a random seed and an epoch to the indices of its samples, the same on every rank."""


def epoch_size(dataset: Dataset[Any], sampler: object, seed: int | None, ranks: int) -> int:
    """Return the number of samples in an epoch.

    Raises:
        DataError: the dataset has no length, as an IterableDataset; the sampler is one of torch's; there are no
            samples; or, with a seed, there are fewer samples than ranks.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        found = "it has no length and no index, so its place in an epoch can't be shared or resumed."
        hint = "world.stream(dataset, batch_size=…) reads it in its own order; or give it __len__ and __getitem__"
        raise DataError(f"Sharing a {type(dataset).__name__} among ranks:", found, hint)
    if sampler is not None and not callable(sampler):
        found = "its order does not follow from a seed and an epoch, so ranks would differ, and none could resume."
        hint = "give a function: sampler=lambda seed, epoch: indices"
        raise DataError(f"Sharing samples by a {type(sampler).__name__}:", found, hint)
    asked = f"Sharing a {type(dataset).__name__} among {counted(ranks, 'rank')}:"
    if len(dataset) == 0:
        raise DataError(asked, "the dataset is empty.", "is its path right? See what is there: ls -l PATH")
    size = len(dataset if sampler is None else sampler(seed or 0, 0))
    if size == 0:
        raise DataError(asked, "the sampler gave no indices for epoch 0.", "return the indices of the epoch's samples")
    if seed is not None and size < ranks:
        found = "a rank without samples can't take part in training."
        raise DataError(f"Sharing {size} samples among {ranks} ranks:", found, f"use at most {size} GPUs")
    return size


class Indices(list[int]):
    """The indices of the samples of one batch, and the random seed for loading them."""

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class DistributedBatchSampler(Sampler[list[int]]):
    """The sample indices of one rank, one list per step.

    Args:
        size: number of samples in an epoch, before `drop_last`.
        batch_size: samples per rank and step.
        seed: random seed of the shuffle; None for the dataset's own order.
        sampler: gives the order of an epoch, of `size` samples; None: each sample once.
        drop_last: leave out an epoch's last global batch if it is smaller than the others.

    Raises:
        DataError: `batch_size` is below 1; or `drop_last` leaves nothing.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int | None,
        sampler: Order | None = None,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"Batches of {batch_size} samples:", "a batch has 1 or more.", "--batch-size 64")
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.global_batch = batch_size * world_size
        self.size = size // self.global_batch * self.global_batch if drop_last else size
        if size > 0 == self.size:
            asked = f"Global batches of {self.global_batch} samples, with drop_last=True:"
            raise DataError(asked, f"there are only {size} samples.", "use smaller batches or fewer ranks")
        self._samples, self._sampler = size, sampler
        self.epoch = self.first_step = 0
        self.bounds = self.bounds_from(0)

    def bounds_from(self, seen: int) -> list[tuple[int, int]]:
        """Return the global batches that are left after `seen` samples, as (start, stop) in the order of the epoch."""
        starts = list(range(seen, self.size, self.global_batch))
        # The last global batch needs a sample for every rank; a smaller one joins the batch before it.
        if len(starts) > 1 and self.size - starts[-1] < self.world_size:
            starts.pop()
        return list(zip(starts, [*starts[1:], self.size]))

    def shares(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) for each step: this rank takes every world_size-th sample of that range of the order."""
        for start, stop in self.bounds:
            if start + self.rank < stop:  # if there are fewer samples than ranks, some ranks get none
                yield start + self.rank, stop

    def order(self) -> torch.Tensor:
        """Return all sample indices in this epoch's order: int64, one dimension, on the CPU.

        Raises:
            DataError: the sampler gives another number of samples than in the first epoch.
        """
        if self._sampler is not None:
            order = torch.as_tensor(self._sampler(self.seed or 0, self.epoch), dtype=torch.int64)
            if order.shape != (self._samples,):
                found = f"it gave indices of shape {tuple(order.shape)}, and {self._samples} indices for epoch 0."
                raise DataError(f"Sampling epoch {self.epoch}:", found, "return as many indices for each epoch")
            return order
        if self.seed is None:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.epoch))
        return torch.randperm(self._samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order().tolist()
        epoch_seed = stream_seed(self.seed or 0, self.epoch)
        for step, (start, stop) in enumerate(self.shares(), self.first_step):
            seed = stream_seed(stream_seed(epoch_seed, step), self.rank)
            yield Indices(order[start : stop : self.world_size], seed)

    def __len__(self) -> int:
        return len(self.bounds)


class Shard(TrainingData):
    """Iterates over this rank's batches; made by `World.shard`.

    Each pass is the epoch of the last `set_epoch`; without it, the order is the same each time. In the loop, `step`,
    `seen`, `progress`, `mean_batch` and `is_full_batch` are those of the current batch.

    Args:
        source: iterates over the batches, anew for each pass: a `DeviceLoader` or a `Loader`.
        fingerprint: of the dataset (see `fingerprint`); None if unknown.
    """

    def __init__(
        self, batches: DistributedBatchSampler, source: Iterable[Any], *, fingerprint: str | None = None
    ) -> None:
        super().__init__(batches.world_size)
        self.batches, self.fingerprint = batches, fingerprint
        self._source = source
        self._resume_at = (0, 0)
        self._steps_per_epoch = len(batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0. A new epoch starts at its beginning."""
        if epoch != self.batches.epoch:
            self.resume(epoch, step=0, seen=0)

    def resume(self, epoch: int, *, step: int, seen: int) -> None:
        """Let the next pass start in an epoch, after some batches and the samples that all ranks have seen in them.

        Raises:
            DataError: with a shuffle seed, fewer samples are left than there are ranks.
        """
        left, world_size = self.size - seen, self.batches.world_size
        if self.batches.seed is not None and 0 < left < world_size:
            found = f"{left} samples are left in the epoch, and a rank without samples can't take part."
            hint = f"use at most {left} GPUs to the end of this epoch"
            raise DataError(f"Resuming with {world_size} ranks:", found, hint)
        self.batches.epoch, self._resume_at = epoch, (step, seen)
        self.step, self.seen = step - 1, seen

    def resume_at(self, epoch: int, place: Mapping[str, Any], of_ranks: Sequence[Any]) -> None:
        """Do the same as `resume`, from a place in a checkpoint."""
        self.resume(epoch, step=place["step"], seen=place["seen"])

    def place(self) -> dict[str, Any]:
        """Return the place in the epoch, and what tells whether a dataset is the same."""
        return {
            "size": self.size,
            "seed": self.batches.seed,
            "global_batch": self.batches.global_batch,
            "fingerprint": self.fingerprint,
            "step": self.step + 1,
            "seen": self.seen,
        }

    @property
    def is_full_batch(self) -> bool:
        """Whether every rank has exactly `batch_size` samples in this batch; the same on all ranks."""
        return self._batch_samples == self.batches.global_batch

    @property
    def is_at_end(self) -> bool:
        """Whether this batch is the last one of its epoch."""
        return self.seen == self.size

    @property
    def size(self) -> int:
        """Number of samples in an epoch, of all ranks together."""
        return self.batches.size

    def __iter__(self) -> Iterator[Any]:
        (step, seen), self._resume_at = self._resume_at, (0, 0)
        self.batches.first_step, self.batches.bounds = step, self.batches.bounds_from(seen)
        self._begin_pass(step, seen)
        for (start, stop), batch in self._timed(zip(self.batches.bounds, self._source)):
            self.step, self.seen, self._batch_samples = self.step + 1, stop, stop - start
            rank_progress.note_progress()
            yield batch
        if self.at_end:
            self.at_end()

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch, the same on all ranks."""
        return self._steps_per_epoch
