"""Each rank's share of a dataset, batch by batch: no sample is lost or repeated.

The order of an epoch's samples depends on seed and epoch only. It is cut into global batches of world_size x batch_size
samples, or of `global_batch` samples, which are cut again if a rank's share is larger than `batch_size`. From each of
them, a rank takes every world_size-th sample. So all ranks make the same number of steps, and a global batch does not
depend on how many ranks share it. (DistributedSampler repeats samples instead.) The place in an epoch is a number of
samples, so that another number of ranks can resume from it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from cluster_ddp.errors import DataError, counted
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.data import dataset_attributes
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.data.dataset_attributes import PlainAttributes
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.runtime.rng import stream_seed

log = logging.getLogger("cluster_ddp")

_SAME_ORDER = "let it depend on the seed, the epoch, and parts of the Checkpointer that change between epochs only"

Order = Callable[[int, int], Sequence[int]]
"""A sampler of one's own: from a random seed and an epoch to the indices of its samples, the same on every rank."""


class Indices(list[int]):
    """The indices of the samples of one batch, and the random seed for loading them."""

    def __init__(self, indices: list[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class DistributedBatchSampler(Sampler[list[int]]):
    """The sample indices of one rank, one list per batch.

    Args:
        size: number of samples in an epoch, before `drop_last`.
        batch_size: samples per rank and step; with `global_batch`, the most per rank and batch, or None for its share.
        seed: random seed of the shuffle; None for the dataset's own order.
        sampler: gives the order of an epoch, of `size` samples; None: each sample once.
        drop_last: leave out an epoch's last global batch if it is smaller than the others.
        global_batch: samples of an update of all ranks; None: `batch_size` of each rank.

    Raises:
        DataError: neither is given, or one is below 1; `drop_last` leaves nothing; or an update of `global_batch`
            has fewer samples than there are ranks.
    """

    def __init__(
        self,
        size: int,
        batch_size: int | None,
        *,
        rank: int,
        world_size: int,
        seed: int | None,
        sampler: Order | None = None,
        drop_last: bool = False,
        global_batch: int | None = None,
    ) -> None:
        counts = [count for count in (batch_size, global_batch) if count is not None]
        if min(counts, default=0) < 1:
            asked = f"Batches of {min(counts)} samples:" if counts else "Sharing samples without a batch_size:"
            raise DataError(asked, "a batch has 1 or more.", "give world.shard(…) batch_size=64")
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.accumulates = global_batch is not None
        self.batch_size = batch_size or _ratio_up(global_batch or 1, world_size)
        self.global_batch = global_batch or self.batch_size * world_size
        self.size = size // self.global_batch * self.global_batch if drop_last else size
        if size > 0 == self.size:
            asked = f"Global batches of {self.global_batch} samples, with drop_last=True:"
            raise DataError(asked, f"there are only {size} samples.", "use smaller batches or fewer ranks")
        self._samples, self._sampler, self.epoch = size, sampler, 0
        self.order_digest: str | None = None
        """SHA-256 of the order that `sampler` gave for the epoch that was begun last; None without one."""
        self.bounds = self.bounds_from(0)
        if self.accumulates:
            larger = f", or global_batch={2 * world_size} or more" if self.size >= world_size else ""
            asked = f"Sharing updates of {global_batch} samples among {counted(world_size, 'rank')}:"
            self.require_samples(self.bounds, asked, larger)

    def bounds_from(self, seen: int) -> list[tuple[int, int]]:
        """Return the global batches that are left after `seen` samples, as (start, stop) in the order of the epoch."""
        starts = list(range(seen, self.size, self.global_batch))
        # The last global batch needs a sample for every rank; a smaller one joins the batch before it. But with
        # global_batch no cut depends on the number of ranks: the last two are halves of what is left.
        if len(starts) > 1 and self.accumulates:
            starts[-1] = (starts[-2] + self.size + 1) // 2
        elif len(starts) > 1 and self.size - starts[-1] < self.world_size:
            starts.pop()
        return list(zip(starts, [*starts[1:], self.size]))

    def batches(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield each batch of all ranks, and its global batch, as (start, stop) in the order of the epoch.

        With `global_batch`, each rank has samples in each: at most `batch_size`, or 2 where 1 would leave a rank none.
        """
        for start, stop in self.bounds:
            rows, rest = divmod(stop - start, self.world_size)  # a row has a sample for every rank
            count = min(rows, _ratio_up(rows + bool(rest), self.batch_size)) if self.accumulates else 1
            cuts = [start + _ratio_up(number * rows, count) * self.world_size for number in range(count)]
            for cut, following in zip(cuts, [*cuts[1:], stop]):
                yield (cut, following), (start, stop)

    def require_samples(self, bounds: Sequence[tuple[int, int]], asked: str, hint: str) -> None:
        """Raise DataError if a global batch has fewer samples than there are ranks. `hint` adds to the cure."""
        smallest = min((stop - start for start, stop in bounds), default=self.world_size)
        if smallest < self.world_size:
            found = f"one update has {smallest} samples, and a rank without samples can't take part in training."
            raise DataError(asked, found, f"use at most {smallest} GPUs{hint}")

    def shares(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) for each batch: this rank takes every world_size-th sample of that range of the order."""
        for (start, stop), _ in self.batches():
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
            self.order_digest = hashlib.sha256(order.numpy().tobytes()).hexdigest()
            return order
        if self.seed is None:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.epoch))
        return torch.randperm(self._samples, generator=generator)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order().tolist()
        epoch_seed = stream_seed(self.seed or 0, self.epoch)
        for start, stop in self.shares():
            yield Indices(order[start : stop : self.world_size], stream_seed(epoch_seed, start))

    def __len__(self) -> int:
        return len(list(self.batches()))


def _ratio_up(count: int, of: int) -> int:
    """The quotient, rounded up."""
    return -(-count // of)


class Shard(BatchIterator):
    """Iterates over this rank's batches; made by `World.shard`.

    Each pass is the epoch of the last `set_epoch`. In the loop, `seen`, `loss_scale` and `is_full_batch` are the
    current batch's; `step`, `progress` and `mean_batch` are its update's. With `global_batch` that may have several
    batches; a checkpoint then has the place after the last whole update.

    Args:
        source: iterates over the batches, anew for each pass: a `DeviceLoader` or a `Loader`.
        fingerprint: of the dataset (see `fingerprint`); None if unknown.
        dataset: whose attributes a script may set.
    """

    size: int

    def __init__(
        self,
        batches: DistributedBatchSampler,
        source: Iterable[Any],
        *,
        fingerprint: str | None = None,
        dataset: object = None,
    ) -> None:
        options = {"shuffles": batches.seed is not None, "accumulates": batches.accumulates}
        super().__init__(batches.rank, batches.world_size, batches.size, **options)
        self.batches, self.fingerprint, self._source = batches, fingerprint, source
        self._attributes = PlainAttributes(dataset)
        self._resume_at = self._batch = (0, 0)
        self._order_before: str | None = None  # that of the part of this epoch which is done
        self._has_sampled_again = False
        self._steps_per_epoch = len(batches.bounds)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0. A new epoch starts at its beginning."""
        self._has_epochs = True
        if epoch != self.batches.epoch:
            self.resume(epoch, step=0, seen=0)

    def resume(self, epoch: int, *, step: int, seen: int) -> None:
        """Let the next pass start in an epoch, after some steps and the samples that all ranks have seen in them.

        Raises:
            DataError: with a shuffle seed or `global_batch`, too few samples are left for this number of ranks.
        """
        if self.batches.seed is not None or self.accumulates:
            asked = f"Resuming the rest of an epoch, {self.size - seen} samples, with {self.batches.world_size} ranks:"
            self.batches.require_samples(self.batches.bounds_from(seen), asked, " to the end of this epoch")
        self.forget_passes()
        self.batches.epoch, self._resume_at = epoch, (step, seen)
        self.step, self.seen, self._update_start, self._update_samples = step - 1, seen, seen, 0

    @property
    def collate_fn(self) -> object:
        """What the script gave to make batches of samples; None if it gave nothing."""
        return getattr(self._source, "collate_fn", None)

    def own_generators(self) -> list[str]:
        """Return the places of random number generators in the dataset, and in what makes batches of its samples."""
        return [*self._attributes.generators(), *dataset_attributes.generators("collate_fn", self.collate_fn)]

    def resume_at(self, epoch: int, place: Mapping[str, Any], of_ranks: Sequence[Any]) -> None:
        """Do the same as `resume`, from a place in a checkpoint."""
        self.resume(epoch, step=place["step"], seen=place["seen"])
        self._order_before = place.get("order") if 0 < place["seen"] < self.size else None
        self._attributes.resume(place["attributes"])
        self._attributes.first_steps.resume(place["first_attributes"], inside=place["step"] > 0)

    def place(self) -> dict[str, Any]:
        """Return the place in the epoch, and what tells whether a dataset is the same."""
        is_whole = self.ends_update
        return {
            "size": self.size,
            "seed": self.batches.seed,
            "global_batch": self.batches.global_batch,
            "fingerprint": self.fingerprint,
            "order": self.batches.order_digest,
            "attributes": self._attributes.changed(),
            "first_attributes": self._attributes.first_steps.noted,
            "step": self.step + is_whole,
            "seen": self.seen if is_whole else self._update_start,
        }

    @property
    def ends_update(self) -> bool:
        """Whether this batch is the last one of its update; the same on all ranks."""
        return self.seen == self._update_start + self._update_samples

    @property
    def loss_scale(self) -> float:
        """Multiply this batch's mean loss by it to weight all samples of the update, on all ranks, equally."""
        if not self._update_samples:
            hint = "read it in the loop, for each batch: their sizes differ"
            raise DataError("Reading shard.loss_scale:", "no batch was taken yet.", hint)
        return self._own_samples / self.mean_batch

    @property
    def _own_samples(self) -> int:
        """Number of samples in this rank's batch."""
        return len(range(self._batch[0] + self.batches.rank, self._batch[1], self.world_size))

    def note_accumulation(self) -> None:
        """Note that `World.accumulate` has a batch of it: with `global_batch`, it could have fewer samples."""
        super().note_accumulation()
        last_progress.note_micro_batch(self._own_samples if self.accumulates else None)

    @property
    def is_at_end(self) -> bool:
        """Whether this batch is the last one of its epoch."""
        return self.seen == self.size

    def _batches_of_pass(self) -> Iterator[Any]:
        (step, seen), self._resume_at = self._resume_at, (0, 0)
        self.batches.bounds = self.batches.bounds_from(seen)
        self._begin_pass(step, seen)
        if self.rank == 0:
            self._attributes.begin_pass()
        for (bounds, update), batch in self._timed(zip(self.batches.batches(), self._source)):
            if bounds[0] == update[0]:
                self._begin_update(*update)
            self._batch, self.seen = bounds, bounds[1]
            self.is_full_batch = bounds[1] - bounds[0] == self.batches.batch_size * self.world_size
            last_progress.note_progress()
            self._check_order()
            yield batch
            if self.rank == 0:
                self._attributes.tell(self.batches.epoch)
            self._asked_for_next()
        self._ended()

    def _check_order(self) -> None:
        """Say so if the sampler's order is another one than before a resume, or at the end of the first epoch."""
        digest, before = self.batches.order_digest, self._order_before
        self._order_before = None
        if before not in (None, digest):
            self._tell_of_order("it is another one than before the resume: samples are trained twice, others never.")
        if digest and self.is_at_end and not self._has_sampled_again:
            self._has_sampled_again = True
            numbers = rng.of_cpu()
            self.batches.order()
            rng.set_of_cpu(numbers)
            if self.batches.order_digest != digest:
                self._tell_of_order("it was another one when the epoch began: a resume within it is not exact.")
            self.batches.order_digest = digest

    def _tell_of_order(self, found: str) -> None:
        if self.rank == 0:
            asked = f"The sampler's order of epoch {self.batches.epoch + 1}:"
            log.error("%s\nTraining continues.", DataError(asked, found, _SAME_ORDER))

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch, the same on all ranks."""
        return self._steps_per_epoch
