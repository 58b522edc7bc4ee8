"""What a `Shard` and a `Stream` have in common: a rank's batches, the place in the epoch, and how fast they come."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class TrainingData(ABC):
    """Iterates over this rank's batches of an epoch.

    Each pass is the epoch of the last `set_epoch`. In the loop, `step`, `seen`, `progress`, `mean_batch` and
    `is_full_batch` are those of the current batch.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.step = -1
        """Number of the batch in its epoch, from 0; -1 before the first."""
        self.seen = 0
        """Samples of the epoch that all ranks together have seen, including this batch."""
        self.at_end: Callable[[], object] | None = None
        """Called after the last batch of a pass, before the loop ends."""
        self._batch_samples = 0
        self._seen_before = 0
        self.began_s = 0.0
        """When this pass began, on the clock of time.monotonic(); 0 before the first."""
        self.waited_s = 0.0
        """Seconds that this rank has waited for batches since this pass began."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of samples in an epoch, of all ranks together; None while it is unknown."""

    @property
    @abstractmethod
    def is_at_end(self) -> bool:
        """Whether the current batch is the last one of its epoch; the same on all ranks."""

    @property
    @abstractmethod
    def is_full_batch(self) -> bool:
        """Whether every rank has exactly `batch_size` samples in this batch; the same on all ranks."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0. A new epoch starts at its beginning."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Return the place in the epoch, the same on all ranks, as a checkpoint has it in `shards`."""

    def place_of_rank(self) -> Any:
        """Return what differs between ranks in that place, as tensors and plain values; None if nothing does."""
        return None

    @abstractmethod
    def resume_at(self, epoch: int, place: Mapping[str, Any], of_ranks: Sequence[Any]) -> None:
        """Let the next pass start in an epoch at a saved place, with `place_of_rank` of each rank that saved it.

        Raises:
            DataError: it can't.
        """

    @property
    def mean_batch(self) -> float:
        """Mean number of samples per rank in this batch. Divide a summed loss by it to weight all samples equally."""
        return self._batch_samples / self._world_size

    @property
    def progress(self) -> float:
        """The part of the epoch before this batch: from 0 to below 1; 0 while the size is unknown."""
        size = self.size
        return min(1.0, (self.seen - self._batch_samples) / size) if size else 0.0

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

    def _begin_pass(self, step: int, seen: int) -> None:
        self.step, self.seen, self._seen_before = step - 1, seen, seen
        self.began_s, self.waited_s = time.monotonic(), 0.0

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            start_s = time.monotonic()
            batch = next(batches, None)
            self.waited_s += time.monotonic() - start_s
            if batch is None:
                return
            yield batch
