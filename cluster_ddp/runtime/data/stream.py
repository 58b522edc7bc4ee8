"""Each rank's share of data without a length and an index, batch by batch.

split="items": the order of an epoch's items is cut into global batches of world_size x batch_size items, and a rank
takes every world_size-th one. So the content of a global batch does not depend on how many ranks share it, and the
place in an epoch is a number of items, as in a `Shard`. Every rank and worker reads all items and drops what is not its
own. split="own": the iterable gives each rank and worker a share of its own, and nobody deals again.

Before each step the ranks know whether all of them have a batch: if one has none, the epoch ends for all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader

from cluster_ddp.errors import DataError, counted
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.data.data_loader import as_it_is, copied
from cluster_ddp.runtime.data.device_dataset import fingerprint
from cluster_ddp.runtime.data.stream_places import StreamPlaces
from cluster_ddp.runtime.data.stream_reader import Order, PassStart, StreamReader, WorkerBatch
from cluster_ddp.runtime.data.uneven_inputs import FirstItems, NextBatchAgreement
from cluster_ddp.runtime.failure import last_progress

log = logging.getLogger("cluster_ddp")


class Stream(BatchIterator):
    """Iterates over this rank's batches of an iterable; made by `World.stream`.

    Args:
        reader: reads the iterable.
        device: copy the batches to this GPU; None leaves them where they are.
        options: for the DataLoader that has the workers.
    """

    def __init__(self, reader: StreamReader, *, device: torch.device | None, **options: Any) -> None:
        super().__init__(reader.rank, reader.world_size, None)
        self.split, self.fingerprint = reader.split, fingerprint(reader.iterable)
        self.iterable, self._reader, self._device = reader.iterable, reader, device
        self._epoch, self._number = 0, -1
        self._places = StreamPlaces(options["num_workers"] or 1, reader.split)
        self._is_resumed = self._has_pass = False
        self._is_at_end = False
        self._agreement, self._has_asked = NextBatchAgreement(reader.rank, reader.world_size), False
        self._firsts = FirstItems(reader.split, told=False)
        self._orders = _Orders()
        self._loader: DataLoader[WorkerBatch] = DataLoader(
            reader, sampler=self._orders, batch_size=None, collate_fn=as_it_is, **options
        )

    @property
    def is_at_end(self) -> bool:
        """Whether the current batch is the last one of its epoch: some rank has no other."""
        return self._agreement.collect().ranks < self.world_size if self._has_asked else self._is_at_end

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0. A new epoch starts at its beginning."""
        if epoch != self._epoch:
            self.forget_passes()
            self._to_beginning()
            self._epoch, self._is_resumed = epoch, False

    def place(self) -> dict[str, Any]:
        """Return the place in the epoch, which is the same on all ranks."""
        return {
            "size": None,
            "seed": self._reader.seed,
            "global_batch": (self._reader.batch_size or 0) * self.world_size,
            "fingerprint": self.fingerprint,
            "step": self.step + 1,
            "seen": self.seen,
            "stream": self.split,
            "is_at_end": (is_at_end := self.is_at_end),
            "last_size": self.seen if is_at_end else self.size,
        }

    def place_of_rank(self) -> dict[str, Any]:
        """Return how far this rank's readers are, in what the training has taken, and the states of their iterables."""
        return self._places.saved()

    def resume_at(self, epoch: int, place: Mapping[str, Any], of_ranks: Sequence[Any]) -> None:
        """Let the next pass start in an epoch at a saved place, with `place_of_rank` of each rank that saved it.

        Raises:
            DataError: the iterable splits itself, and the number of ranks or of their readers is another one.
        """
        mine: Mapping[str, Any] | None = of_ranks[0]  # with split="items" all are the same
        if self.split == "own":
            like = of_ranks[self.rank % len(of_ranks)]  # ranks may have different numbers of CPUs, and so of readers
            before, now = (len(of_ranks), like["readers"]), (self.world_size, self._places.readers)
            if before != now and place["step"] and not place["is_at_end"]:
                raise _other_shares(before, now)
            mine = of_ranks[self.rank] if before == now else None  # an epoch begins with any number
        self._places.load(mine)
        self.forget_passes()
        self._epoch, self.size, self._is_at_end = epoch, place["last_size"], place["is_at_end"]
        self.step, self.seen = place["step"] - 1, place["seen"]
        self._is_resumed, self._has_pass, self._has_asked = True, False, False

    def _batches_of_pass(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._to_beginning()
        self._is_resumed = False
        self._begin_pass(self.step + 1, self.seen)
        if not self.is_at_end:
            yield from self._pass()
        self._ended()

    def _pass(self) -> Iterator[Any]:
        """One batch is always ahead, so that the ranks can agree on it while they train on the one before."""
        self._has_pass, self._number = True, self._number + 1
        self._firsts = FirstItems(self.split, told=self.rank == 0)
        records = self._records()
        ahead = self._ask(records)
        while self._all_have_one() and ahead is not None:
            record, found = ahead, self._agreement.collect()
            self._places.take(record)
            self._begin_update(self.seen, self.seen + found.samples)
            self.seen += found.samples
            self.is_full_batch = found.full == self.world_size
            ahead = self._ask(records)
            last_progress.note_progress()
            yield record.batch
            self._asked_for_next()
        self._note_end()

    def _ask(self, records: Iterator[WorkerBatch]) -> WorkerBatch | None:
        """Return this rank's next batch, if it has one, and begin to ask the others whether they have one."""
        start_s = time.monotonic()
        ahead = next(records, None)
        self.waited_s += time.monotonic() - start_s
        samples = 0 if ahead is None else ahead.samples
        is_full = ahead is not None and samples == (self._reader.batch_size or samples)
        self._agreement.begin(has_batch=ahead is not None, samples=samples, is_full=is_full, first=self._firsts.mine)
        self._has_asked = True
        return ahead

    def _all_have_one(self) -> bool:
        """Return whether all ranks have a next batch."""
        start_s = time.monotonic()
        is_at_end = self.is_at_end
        self.waited_s += time.monotonic() - start_s
        self._firsts.check(self._agreement.collect().firsts)
        return not is_at_end

    def _records(self) -> Iterator[WorkerBatch]:
        """Yield this rank's batches, and note which readers have come to their end."""
        self._orders.begin_pass(self._number, self._places.turn, self._places.starts(self._epoch, self.seen))
        loaded = iter(self._loader) if self._device is None else copied(self._loader, self._device, ahead=True)
        for record in loaded:
            self._firsts.note(record.worker, record.first)
            if record.is_end and self._places.note_end(record):
                return
            if record.samples:
                yield record

    def _to_beginning(self) -> None:
        """Go to the beginning of an epoch, once."""
        if self._has_asked:
            self._agreement.collect()
        self._has_asked = self._is_at_end = False
        if self._has_pass or self.step >= 0:
            self._places.to_beginning(is_begun=self._has_pass)
        self.step, self.seen, self._has_pass = -1, 0, False

    def _note_end(self) -> None:
        """Note the end of an epoch, and say once what was left over."""
        with_batch = self._agreement.collect().ranks
        if self.seen == 0:
            raise DataError(
                f"Reading an epoch of a stream on {counted(self.world_size, 'rank')}:",
                f"{self.world_size - with_batch} of them have no batch.",
                'is the iterable empty? Each rank needs an item, and with split="own" a shard of its own',
            )
        self.size = self.seen
        if with_batch and not self._has_told:
            self._has_told = True
            if self.rank == 0:
                words = "The stream ended on %d of %d ranks. What the others had left of this epoch was not trained."
                log.warning(f"{words} (This is said once.)", self.world_size - with_batch, self.world_size)


class _Orders:
    """Stands where the loader has a sampler: it yields what the workers are to read next, without an end.

    It does not know the stream. In a cycle of references, the workers' queues would be closed before the loader's own
    end, which would then wait five seconds for each worker.
    """

    _number = _turn = 0
    _starts: Sequence[PassStart] = ()

    def begin_pass(self, number: int, turn: int, starts: Sequence[PassStart]) -> None:
        """Begin the pass of this number with the reader whose turn it is; `starts` are those of all readers."""
        self._number, self._turn, self._starts = number, turn, starts

    def __iter__(self) -> Iterator[Order]:
        for place in count():
            step = place - self._turn
            start = self._starts[place % len(self._starts)] if 0 <= step < len(self._starts) else None
            yield Order(self._number, max(step, -1), start)


def _other_shares(before: tuple[int, int], now: tuple[int, int]) -> DataError:
    ranks_before, ranks_now = (
        f"{counted(ranks, 'rank')} with {counted(each, 'reader')}" for ranks, each in (before, now)
    )
    return DataError(
        f"Resuming a stream in the middle of an epoch on {ranks_now} each:",
        f'{ranks_before} each saved it, and with split="own" the iterable would give them other shares.',
        f"resume on {counted(before[0], 'rank')} with num_workers={before[1]} (a rank without workers is one reader), "
        'at least to the end of the epoch; or use split="items" from the start, which any number of ranks can resume',
    )
