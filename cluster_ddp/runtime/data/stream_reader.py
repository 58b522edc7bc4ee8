"""Reads an iterable in a loader's worker, or in the rank itself: one batch for each order.

torch's own way with an IterableDataset has each worker read on for itself: which batch comes next then depends on when
a worker ends, and nobody can tell a worker that persists where to begin. So a `StreamReader` is a dataset with an
index, and each index is an order. The loader gives them to one worker after another, and returns the batches in order.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from cluster_ddp.errors import DataError, first_of
from cluster_ddp.runtime import rng
from cluster_ddp.runtime.data import dataset_attributes
from cluster_ddp.runtime.data.data_loader import protected_start
from cluster_ddp.runtime.data.uneven_inputs import Split, digest, samples_in
from cluster_ddp.runtime.rng import stream_seed

log = logging.getLogger("cluster_ddp")

_CPU = (torch.device("cpu"),)


class PassStart(NamedTuple):
    """Where a worker begins a pass."""

    epoch: int
    seen: int
    """Items of all ranks before it; with split="own", items of this worker before it."""
    is_ended: bool = False
    """Whether it has nothing left in this epoch."""
    state: bytes | None = None
    """`WorkerBatch.state` of the batch before; None: the worker reads the items before."""
    is_anew: bool = False
    """Whether its last pass was left before its end, so that the iterable may not be at its beginning."""


class Order(NamedTuple):
    """What a worker is asked for: the next batch of a pass."""

    number: int
    """Of the pass."""
    step: int
    """Number of the global batch since the pass began; -1: nothing, it is not this worker's turn yet."""
    start: PassStart | None
    """In the first order of a pass to each worker."""


class WorkerBatch(NamedTuple):
    """What a worker returns."""

    worker: int
    batch: Any = None
    samples: int = 0
    taken: int = 0
    """Items that the worker has read for it."""
    is_end: bool = False
    """Whether the worker has no more batches; then there is none here."""
    first: int = 0
    """A digest of the item that it read first in this pass."""
    state: bytes | None = None
    """Pickled: of the iterable after this batch, and of the random number generators."""


class StreamReader(Dataset[WorkerBatch]):
    """Reads an iterable, with random number generators of its own.

    Args:
        iterable: what `World.stream` was given.
        batch_size: items of a batch; None if the iterable's items are batches.
        collate: makes a batch of a list of items; None: torch's default_collate.
        drop_last: leave out batches with fewer samples.
        replay: read the items before a place again, although the iterable has a state.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        batch_size: int | None,
        split: Split,
        collate: Callable[[Any], Any] | None,
        drop_last: bool,
        replay: bool,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.iterable, self.batch_size, self.split, self._collate = iterable, batch_size, split, collate
        self._drop_last, self.seed, self.rank, self.world_size = drop_last, seed, rank, world_size
        self.has_state = not replay and _has_state(iterable)
        self._number, self._worker = -1, 0
        self._first_state: bytes | None = None
        self._has_loaded_end = False
        self._rng: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._made: dict[str, object] | None = None
        self._has_told = False

    def __getitem__(self, order: Order) -> WorkerBatch:
        """Return the batch that an order asks for."""
        info = get_worker_info()
        self._worker = 0 if info is None else info.id
        if order.step < 0:
            return WorkerBatch(self._worker)
        with self._random_numbers():
            if order.number != self._number:
                assert order.start is not None
                self._number = order.number
                self._begin(order.start)
            if self._is_ended:
                return WorkerBatch(self._worker, is_end=True, first=self._first)
            return self._dealt(order.step) if self.split == "items" else self._own()

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Let the iterable draw from generators of its own: in the rank itself, the training's stay as they are."""
        if get_worker_info() is not None:
            yield
            return
        of_training = rng.of_cpu()
        if self._rng is not None:
            rng.set_of_cpu(self._rng)
        try:
            yield
        finally:
            self._rng = rng.of_cpu()
            rng.set_of_cpu(of_training)

    def _begin(self, start: PassStart) -> None:
        if not self.has_state:
            start = start._replace(state=None)
        seed = stream_seed(self.seed, start.epoch)
        if self.split == "own":  # else all read the same items, so that they draw the same numbers
            seed = stream_seed(stream_seed(seed, self.rank), self._worker)
        rng.seed_cpu(seed)
        self._epoch, self._first, self._is_ended = start.epoch, 0, start.is_ended
        self._set_epoch()
        self._load(start)
        if start.is_ended:
            return
        left = {} if self.has_state else self._left_over()
        self._open(seed)
        if left:
            self._iterator = self._telling(self._iterator, left)
        self._position = self._origin = start.seen
        self._ahead: list[Any] = []
        if start.state is None:
            self._skip(start.seen)
        elif start.seen:
            rng.restore(pickle.loads(start.state)["rng"], _CPU)

    def _left_over(self) -> dict[str, object]:
        """The lists and arrays of the iterable that another pass has left in it, by their places."""
        kept = dataset_attributes.kept("iterable", self.iterable)
        self._made = kept if self._made is None else self._made
        values = dataset_attributes.attributes(self.iterable, "iterable")
        return {place: values[place] for place in kept if kept[place] != self._made.get(place)}

    def _telling(self, items: Iterator[Any], left: dict[str, object]) -> Iterator[Any]:
        """Say once if the iterable begins with what is left, and does not put it aside: a resume begins without it."""
        for item in items:
            now = dataset_attributes.attributes(self.iterable, "iterable") if left else {}
            taken, left = [place for place, value in left.items() if now.get(place) is value], {}
            if taken and not self._has_told and self.rank == self._worker == 0:
                self._has_told = True
                found = f"it begins with what the epoch before has left, which no checkpoint has: {first_of(taken)}."
                hint = "begin each pass without that; or give it state_dict() and load_state_dict(state)"
                error = DataError(f"Reading epoch {self._epoch + 1} of a stream:", found, hint)
                log.error("%s\nTraining continues.", error)
            yield item

    def _load(self, start: PassStart) -> None:
        if not self.has_state:
            return
        # A loader's iterators begin anew by themselves, and its state costs it an iterator.
        if self._first_state is None and not isinstance(self.iterable, DataLoader):
            self._first_state = pickle.dumps(self.iterable.state_dict())
        if start.state is not None:
            self.iterable.load_state_dict(pickle.loads(start.state)["iterable"])
            self._has_loaded_end = start.is_ended or not start.seen
        elif start.is_anew and self._first_state is not None:
            self.iterable.load_state_dict(pickle.loads(self._first_state))

    def _open(self, seed: int) -> None:
        """Begin to iterate.

        With the state of an end, some iterables have nothing left, as at the end itself: another pass begins the epoch.
        Others begin it at once, as torchdata's StatefulDataLoader.
        """
        has_loaded_end, self._has_loaded_end = self._has_loaded_end, False
        if has_loaded_end:
            self._set_epoch()  # after that of the state
        with protected_start(self.iterable):
            self._iterator = iter(self.iterable)
            first = list(islice(self._iterator, 1)) if has_loaded_end else []
            if has_loaded_end and not first:
                rng.seed_cpu(seed)
                self._set_epoch()
                self._iterator = iter(self.iterable)
        self._iterator = chain(first, self._iterator)

    def _set_epoch(self) -> None:
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(self._epoch)

    def _dealt(self, step: int) -> WorkerBatch:
        """This rank's part of a global batch: every `world_size`-th item. All ranks and workers read all items."""
        ranks = self.world_size
        global_batch = (self.batch_size or 1) * ranks
        start = self._origin + step * global_batch
        items = self._ahead if self._position > start else []
        self._position += self._skip(start - self._position)
        items = items + self._read(start + global_batch)
        if self._position - start < (global_batch if self._drop_last else ranks):
            return self._end()  # fewer items than ranks are part of the batch before
        state, self._ahead = self._state(), []
        if ranks > 1 and not self._drop_last:  # the next global batch needs an item for every rank
            self._ahead = self._read(start + global_batch + ranks)
            if self._position < start + global_batch + ranks:
                items, self._ahead = items + self._ahead, []
        return self._record(items, start, len(items), state)

    def _read(self, stop: int) -> list[Any]:
        """Read up to a position in the epoch, and return the items that are this rank's."""
        mine = []
        for item in islice(self._iterator, max(0, stop - self._position)):
            self._first = self._first or digest(item)
            if (self._position - self._origin) % self.world_size == self.rank:
                mine.append(item)
            self._position += 1
        return mine

    def _skip(self, count: int) -> int:
        """Read so many items and drop them. Return how many there were."""
        items = 0
        for item in islice(self._iterator, max(0, count)):
            self._first, items = self._first or digest(item), items + 1
        return items

    def _own(self) -> WorkerBatch:
        """A batch of the share that the iterable gives to this worker of this rank."""
        items = list(islice(self._iterator, self.batch_size or 1))
        if not items or (self._drop_last and len(items) < (self.batch_size or 1)):
            return self._end()
        self._first = self._first or digest(items[0])
        start, self._position = self._position, self._position + len(items)
        return self._record(items, start, len(items), self._state())

    def _record(self, items: list[Any], start: int, taken: int, state: bytes | None) -> WorkerBatch:
        batch = self._collated(items if self.batch_size else items[0], start)
        samples = len(items) if self.batch_size else samples_in(batch)
        return WorkerBatch(self._worker, batch, samples, taken, first=self._first, state=state)

    def _collated(self, items: Any, start: int) -> Any:
        """What it draws must not change what the iterable draws next: the ranks collate other items."""
        if self._collate is None:
            return default_collate(items) if self.batch_size else items
        of_iterable = rng.of_cpu()
        place = self.rank if self.split == "items" else stream_seed(self.rank, self._worker)
        rng.seed_cpu(stream_seed(stream_seed(self.seed, self._epoch), stream_seed(place, start)))
        batch = self._collate(items)
        rng.set_of_cpu(of_iterable)
        return batch

    def _end(self) -> WorkerBatch:
        self._is_ended, self._iterator = True, iter(())
        return WorkerBatch(self._worker, is_end=True, first=self._first, state=self._state())

    def _state(self) -> bytes | None:
        if not self.has_state:
            return None
        return pickle.dumps({"iterable": self.iterable.state_dict(), "rng": rng.capture(_CPU)})


def _has_state(iterable: Any) -> bool:
    """Whether it can save and load its state. Of MosaicML's datasets, only the loader knows how to."""
    if not all(hasattr(iterable, name) for name in ("state_dict", "load_state_dict")):
        return False
    needed = [one for one in inspect.signature(iterable.state_dict).parameters.values() if one.default is one.empty]
    return all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed)
