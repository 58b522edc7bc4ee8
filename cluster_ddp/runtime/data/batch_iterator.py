"""What a `Shard` and a `Stream` have in common: a rank's batches, the place in the epoch, and how fast they come."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from cluster_ddp.errors import SpecError

log = logging.getLogger("cluster_ddp")

being_read: weakref.WeakSet[BatchIterator] = weakref.WeakSet()
"""Those that a loop is reading now."""


class Loop(Protocol):
    """The loop of a training, which reads a shard."""

    def before_pass(self, shard: BatchIterator) -> None:
        """Called before each pass over a shard."""

    def after_body(self) -> None:
        """Called when the next batch is asked for: all code of the loop's body has run."""

    def after_last_batch(self) -> None:
        """Called after the last batch of a pass, before the loop over the shard ends."""


class BatchIterator(ABC):
    """Iterates over this rank's batches of an epoch.

    Each pass is the epoch of the last `set_epoch`; without it, all have the order of the first, which is logged once if
    that is shuffled. In the loop, `step`, `seen`, `progress`, `mean_batch` and
    `is_full_batch` are those of the current batch.
    """

    def __init__(
        self, rank: int, world_size: int, size: int | None, *, shuffles: bool = False, accumulates: bool = False
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._shuffles, self._has_epochs = shuffles, False
        self.passes = 0
        """Number of passes in this epoch, in this process, that had a batch."""
        self.is_read_whole = False
        """Whether one of them has come to its end."""
        self._loop: Loop | None = None
        self.size = size
        """Number of samples in an epoch, of all ranks together; None while it is unknown."""
        self.accumulates = accumulates
        """Whether an update may take several batches, so that `ends_update` says which one completes it."""
        self.is_full_batch = False
        """Whether every rank has exactly `batch_size` samples in this batch; the same on all ranks."""
        self.step = -1
        """Number of the batch in its epoch, from 0; -1 before the first. Of the update, if that has several batches."""
        self.seen = 0
        """Samples of the epoch that all ranks together have seen, including this batch."""
        self._update_start = self._update_samples = 0  # of the epoch, before this update; of it, on all ranks
        self._is_weighted, self._has_told = True, False
        self.is_accumulated = False
        """Whether `World.accumulate` has had a batch of it."""
        self._seen_before = 0
        self.began_s = 0.0
        """When this pass began, on the clock of time.monotonic(); 0 before the first."""
        self.waited_s = 0.0
        """Seconds that this rank has waited for batches since this pass began."""

    @property
    @abstractmethod
    def is_at_end(self) -> bool:
        """Whether the current batch is the last one of its epoch; the same on all ranks."""

    @property
    def is_in_loop(self) -> bool:
        """Whether the loop of a training has it."""
        return self._loop is not None

    def enter(self, loop: Loop) -> None:
        """Let the loop of a training know of each pass and batch."""
        self._loop = loop

    def leave(self, loop: Loop) -> None:
        """Forget the loop, which refers to a training and all its memory, if it is that one."""
        self._loop = None if self._loop is loop else self._loop

    def note_accumulation(self) -> None:
        """Note that `World.accumulate` has a batch of it."""
        self.is_accumulated = True

    @property
    def ends_update(self) -> bool:
        """Whether this batch is the last one of its update; the same on all ranks."""
        return True

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0. A new epoch starts at its beginning."""

    def __iter__(self) -> Iterator[Any]:
        if self._loop is not None:
            self._loop.before_pass(self)
        elif self.passes == 1 and self._shuffles and not self._has_epochs and self.rank == 0:
            log.warning(
                "The second pass over a shard has the order of the first, as its epoch was not set. Loop over "
                "checkpoint.epochs(10), or call shard.set_epoch(epoch) before each pass. (This is said once.)"
            )
        being_read.add(self)
        try:
            is_first = True
            for batch in self._batches_of_pass():
                self.passes += is_first
                is_first = False
                yield batch
            self.is_read_whole = True
        finally:
            being_read.discard(self)

    @abstractmethod
    def _batches_of_pass(self) -> Iterator[Any]: ...

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Return the place in the epoch, the same on all ranks, as a checkpoint has it in `shards`."""

    def place_of_rank(self) -> Any:
        """Return what differs between ranks in that place, as tensors and plain values; None if nothing does."""
        return None

    def own_generators(self) -> list[str]:
        """Return the places of random number generators that the data have themselves, and no checkpoint."""
        return []

    @property
    def collate_fn(self) -> object:
        """What the script gave to make batches of samples; None if it gave nothing."""
        return None

    @abstractmethod
    def resume_at(self, epoch: int, place: Mapping[str, Any], of_ranks: Sequence[Any]) -> None:
        """Let the next pass start in an epoch at a saved place, with `place_of_rank` of each rank that saved it.

        Raises:
            DataError: it can't.
        """

    @property
    def mean_batch(self) -> float:
        """Mean number of samples per rank in this update. Divide a summed loss by it to weight all samples equally."""
        self._is_weighted = True
        return self._update_samples / self.world_size

    @property
    def progress(self) -> float:
        """The part of the epoch before this update: from 0 to below 1; 0 while the size is unknown."""
        return min(1.0, self._update_start / self.size) if self.size else 0.0

    @property
    def seen_in_pass(self) -> int:
        """Samples that all ranks together have seen since this pass began."""
        return self.seen - self._seen_before

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together, since this pass began; 0 before its first batch."""
        return self.seen_in_pass / max(time.monotonic() - self.began_s, 1e-9)

    @property
    def waiting_for_data(self) -> float:
        """The part of the time since this pass began that this rank has waited for batches: 0 to 1."""
        return min(1.0, self.waited_s / max(time.monotonic() - self.began_s, 1e-9))

    def check_step(self, *, told: bool) -> None:
        """Look at whether a step of the training may end after this batch; what looks wrong is logged if `told`.

        Raises:
            SpecError: other batches of the update follow.
        """
        if not self.ends_update:
            hint = "world.accumulate(model, shard) says which batch is the last one: `as is_last`, then `if is_last:`"
            asked = f"A step of the training in update {self.step + 1} of the epoch:"
            raise SpecError(asked, "this is not its last batch: global_batch has cut it.", hint)
        if self.accumulates and not self._is_weighted and not self._has_told:
            self._has_told = True
            if told:
                log.warning(
                    "The script has not looked at shard.loss_scale in this update. Unless it weights the samples in a "
                    "way of its own, multiply the mean loss of each batch by it. (This is said once.)"
                )

    def _begin_update(self, start: int, stop: int) -> None:
        """Begin the next step, with the first batch of the update of these samples of the epoch."""
        self.step, self._update_start, self._update_samples = self.step + 1, start, stop - start
        self._is_weighted = False

    def forget_passes(self) -> None:
        """Forget the passes before: the next one is of another epoch or training, or begins at a saved place."""
        self.passes, self.is_read_whole, self._has_epochs = 0, False, True

    def _begin_pass(self, step: int, seen: int) -> None:
        self.step, self.seen, self._seen_before = step - 1, seen, seen
        self._update_start, self._update_samples = seen, 0
        self.began_s, self.waited_s = time.monotonic(), 0.0

    def _asked_for_next(self) -> None:
        if self._loop is not None:
            self._loop.after_body()

    def _ended(self) -> None:
        if self._loop is not None:
            self._loop.after_last_batch()

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start_s = time.monotonic()
            batch = next(batches, None)
            self.waited_s += time.monotonic() - start_s
            if batch is None:
                return
            yield batch
