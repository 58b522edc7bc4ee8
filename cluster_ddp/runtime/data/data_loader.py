"""torch's DataLoader over a rank's batches, with defaults for training, for datasets that are not in memory.

For a GPU, batches are copied from pinned memory, one batch ahead of the training.

A loader's workers survive the signals that stop a training, end with it, and destroy nothing. slurmstepd sends such a
signal to all processes of a step. If it kills a worker, torch raises an error in the training before anything is saved.
This concerns every DataLoader of a script, so torch's own class is changed (checked in torch 2.10 to 2.15).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cluster_ddp import processes
from cluster_ddp.errors import DataError, check_options, counted, first_of
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.data.dataset_attributes import are_same, attributes
from cluster_ddp.runtime.data.device_dataset import ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Indices
from cluster_ddp.runtime.rng import seed_all

log = logging.getLogger("cluster_ddp")

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # those that have workers
MAX_WORKERS = 8
"""A default that keeps a GPU busy; you may set more."""
_WORKERS_SOCKET = "/pymp-12345678/listener-4194304-0-12345678"  # at most; multiprocessing.connection.arbitrary_address
_LONGEST_SOCKET = 107  # bytes (unix(7)), without the last one
_SHARED = "ranks share the samples, so world.shard chooses them."
_CHOSEN = {
    "dataset": (_SHARED, "give it first: world.shard(dataset, …)"),
    "shuffle": (_SHARED, "world.shard(…, shuffle_seed=1) shuffles each epoch anew"),
    "batch_sampler": (_SHARED, "give an epoch's order: world.shard(…, sampler=lambda seed, epoch: indices)"),
}


class Loader:
    """Iterates over a rank's batches of the epoch that `batches` is set to.

    Args:
        device: the device that the batches are for; for a GPU they are pinned.
        cpus: number of CPUs of this rank.
        to_device: copy the batches to the device; else they stay on the CPU.
        options: for DataLoader; they replace these defaults: for a GPU, one worker for each CPU but one, at most 8; on
            a CPU, none, since the training needs the CPUs. Each epoch has new workers, which have what the loop has
            changed. With persistent_workers, they are kept until the script sets an attribute of the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: DistributedBatchSampler,
        *,
        device: torch.device,
        cpus: int,
        to_device: bool = True,
        **options: Any,
    ) -> None:
        check_options(options, "world.shard(…, {}=…)", DataLoader, chosen=_CHOSEN)
        is_gpu = device.type == "cuda"
        workers = with_defaults(options, workers=min(cpus - 1, MAX_WORKERS) if is_gpu else 0, is_gpu=is_gpu)
        if isinstance(dataset, ResidentSet):
            options.setdefault("collate_fn", as_it_is)
        self._dataset, self._attributes = dataset, attributes(dataset)
        self.collate_fn = options.get("collate_fn")
        """What the script gave to make batches of samples; None if it gave nothing."""
        if workers:
            is_told = batches.rank == 0
            dataset = _SeededInWorkers(dataset, is_told=is_told)
            if self.collate_fn is not None:
                options["collate_fn"] = _CollatedInWorkers(self.collate_fn, is_told=is_told)
        self._make = functools.partial(DataLoader, dataset, batch_sampler=batches, **options)
        self._loader: DataLoader[Any] = self._make()
        self._device, self._ahead = device if to_device and is_gpu else None, bool(workers)

    def __iter__(self) -> Iterator[Any]:
        now = attributes(self._dataset)
        if not are_same(self._attributes, now):  # workers that were kept have a copy of before
            self._attributes, self._loader = now, self._make()
        if self._device is None:
            return iter(self._loader)
        # Without workers, the next batch's random numbers would be drawn before this step's: no copy ahead then.
        return copied(self._loader, self._device, ahead=self._ahead)


def with_defaults(options: dict[str, Any], *, workers: int, is_gpu: bool) -> int:
    """Add the defaults of a training to DataLoader's options; `workers` is that of num_workers, which is returned."""
    given = int(options.setdefault("num_workers", workers))
    options.setdefault("pin_memory", is_gpu)
    # Its own generator: the loader would draw from the rank's, and in a resumed run once more than in another.
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return given


class _SeededInWorkers(Dataset[Any]):
    """A dataset whose random numbers, drawn in a loader's worker, depend on seed, epoch, step and rank only.

    Otherwise they would depend on how many batches the worker has made since its start.
    """

    def __init__(self, dataset: Dataset[Any], *, is_told: bool) -> None:
        self.dataset, self._counts = dataset, _Counts("dataset", dataset, is_told=is_told)

    def __getitems__(self, indices: Indices) -> Any:
        self._counts.begin()
        if get_worker_info() is not None:
            seed_all(indices.seed)
        if hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(list(indices))
        else:
            items = [self.dataset[index] for index in indices]
        self._counts.look()
        return items


class _CollatedInWorkers:
    """A collate_fn that is looked at."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_told: bool) -> None:
        self._collate_fn, self._counts = collate_fn, _Counts("collate_fn", collate_fn, is_told=is_told)

    def __call__(self, samples: Any) -> Any:
        self._counts.begin()
        batch = self._collate_fn(samples)
        self._counts.look()
        return batch


class _Counts:
    """The numbers in the attributes of an object by that name, in a worker's copy of it."""

    def __init__(self, name: str, owner: object, *, is_told: bool) -> None:
        self._name, self._owner, self._looks = name, owner, is_told
        self._before: dict[str, float] | None = None

    def begin(self) -> None:
        """Note them before the worker's first batch: until then, the script may set them."""
        self._before = self._now(self._name, self._owner) if self._before is None else self._before

    def look(self) -> None:
        """Say, after the first batch of the first worker, which have changed by it."""
        info = get_worker_info()
        if not self._looks or (info is not None and info.id):
            return
        self._looks, before, now = False, self._before or {}, self._now(self._name, self._owner)
        if changed := [place for place, value in before.items() if now.get(place, value) != value]:
            found = f"a worker changes {first_of(changed)}, which no checkpoint has: a resume begins anew."
            hint = "if the batches depend on it: let it follow from the samples, or load with num_workers=0"
            log.warning("%s\nTraining continues.", DataError("Loading data with workers:", found, hint))

    @staticmethod
    def _now(name: str, owner: object) -> dict[str, float]:
        return {place: value for place, value in attributes(owner, name).items() if type(value) in (int, float)}  # type: ignore[misc]


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged: a collate_fn that workers can unpickle."""
    return batch


def copied(batches: Iterable[Any], device: torch.device, *, ahead: bool) -> Iterator[Any]:
    """Yield the batches with their tensors on a GPU.

    Args:
        batches: nested lists, tuples and dicts of tensors, pinned, and of anything else. What has a method `to` of its
            own, such as a PackedSequence or a BatchEncoding, is moved by that.
        device: the GPU.
        ahead: copy the next batch's tensors while the training works on this one, in a stream of their own.
    """
    if not ahead:
        for batch in batches:
            yield moved(batch, device)
        return
    stream = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            following = _changed(batch, lambda part: _tensor(part, device)), stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting, device)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device."""
    return _changed(batch, lambda part: _object(_tensor(part, device), device))


def _arrived(batch: Any, copied: torch.cuda.Event, device: torch.device) -> Any:
    """Let the training's stream wait for the copy; its memory is not reused before that stream is done with it.

    Objects with a method `to` move now, in the training's stream: nobody could tell whether all their tensors are
    recorded.
    """
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)

    def received(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            part.record_stream(current)
        return _object(part, device)

    return _changed(batch, received)


def _tensor(part: Any, device: torch.device) -> Any:
    return part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part


def _object(part: Any, device: torch.device) -> Any:
    return part.to(device) if hasattr(part, "to") and not isinstance(part, torch.Tensor) else part


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the nested lists, tuples and dicts with each part that is none of these, or has a `to`, changed."""
    if hasattr(batch, "to"):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_changed(part, change) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_changed(part, change) for part in batch)
    if isinstance(batch, Mapping):
        return {key: _changed(part, change) for key, part in batch.items()}
    return change(batch)


class InitWorker:
    """A worker_init_fn: the worker ignores the signals that stop a training, and ends with its rank, even a killed one.

    A worker that outlives its rank would keep the rank's connections open: the others would wait for it until a time
    limit. Then another worker_init_fn is called.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Called in the worker."""
        if (rank := multiprocessing.parent_process()) is not None and rank.pid is not None:
            processes.end_with(processes.identity(rank.pid))
        numbers = [*map(stop_signals.number_of, stop_signals.DEFAULT_SIGNALS)]
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        if self.then is not None:
            self.then(worker)


@functools.cache
def keep_through_stops() -> None:
    """From now on, workers of all DataLoaders ignore the stop signals and end with this process. Changes DataLoader.

    No forked process collects garbage that it has inherited: all objects of the training, but none of its threads. The
    destructor of an old process group would wait for gloo's threads for ever (seen in torch 2.14: a second training in
    the same Python).
    """
    get_iterator = DataLoader._get_iterator

    @functools.wraps(get_iterator)
    def protected(loader: DataLoader[Any]) -> Any:
        if not loader.num_workers:
            return get_iterator(loader)
        _check_temporary_folder(loader.num_workers)
        with protected_start(loader):
            iterator: Any = get_iterator(loader)
        for worker in iterator._workers:
            # torch and multiprocessing send TERM to a busy worker and wait for its end, but it ignores TERM.
            worker._popen.terminate = worker._popen.kill
        _iterators.add(iterator)
        return iterator

    DataLoader._get_iterator = protected  # type: ignore[assignment, method-assign]
    atexit.register(_end_workers)
    os.register_at_fork(after_in_child=gc.freeze)


def _check_temporary_folder(workers: int) -> None:
    """Raise DataError if the path of a worker's socket would be too long: each worker would fail, and the rank wait."""
    folder = os.fsencode(tempfile.gettempdir())
    if (too_long := len(folder) + len(_WORKERS_SOCKET) - _LONGEST_SOCKET) > 0:
        found = f"its folder for temporary files is too long by {too_long} bytes for a socket: {os.fsdecode(folder)}."
        raise DataError(
            f"Loading data with {counted(workers, 'worker')}:", found, "export TMPDIR=/tmp in the batch script"
        )


@contextlib.contextmanager
def protected_start(loader: object) -> Iterator[None]:
    """Let a loader's workers that the body starts ignore the stop signals, of a class that starts them in its own way.

    Such as torchdata's StatefulDataLoader.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        yield
        return
    if not isinstance(loader.worker_init_fn, InitWorker):
        loader.worker_init_fn = InitWorker(loader.worker_init_fn)
    with stop_signals.stop_signals_blocked():  # until the worker ignores them
        yield


def _end_workers() -> None:
    """End the workers of loaders that still exist at the end of the interpreter, as torch ends those of others.

    Later, torch would leave them to multiprocessing and report their end as an error.
    """
    for iterator in list(_iterators):
        iterator._shutdown_workers()
