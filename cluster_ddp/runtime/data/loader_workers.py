"""A DataLoader's workers: they survive the signals that stop a training, end with the training, and destroy nothing.

slurmstepd sends such a signal to all processes of a step. If it kills a worker, torch raises an error in the training
before anything is saved. This concerns every DataLoader of a script, so torch's own class is changed (checked in torch
2.10 to 2.15).

A forked worker inherits all objects of the training, but none of its threads. If its garbage collection found an old
process group, the destructor would wait for gloo's threads for ever (seen in torch 2.14: a second training in the same
Python). So forked processes leave alone what they inherit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from cluster_ddp.runtime import stop_signals

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # those that have workers


class IgnoreStopSignals:
    """A worker_init_fn that makes the worker ignore the signals that stop a training, and calls another one `then`."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Ignore the signals. Called in the worker."""
        numbers = [*map(stop_signals.number_of, stop_signals.DEFAULT_SIGNALS)]
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        if self.then is not None:
            self.then(worker)


@functools.cache
def keep_through_stops() -> None:
    """From now on, workers of all DataLoaders ignore the stop signals and end with this process. Changes DataLoader.

    No forked process collects garbage that it has inherited.
    """
    get_iterator = DataLoader._get_iterator

    @functools.wraps(get_iterator)
    def protected(loader: DataLoader[Any]) -> Any:
        if not loader.num_workers:
            return get_iterator(loader)
        if not isinstance(loader.worker_init_fn, IgnoreStopSignals):
            loader.worker_init_fn = IgnoreStopSignals(loader.worker_init_fn)
        with stop_signals.stop_signals_blocked():  # until the worker ignores them
            iterator: Any = get_iterator(loader)
        for worker in iterator._workers:
            # torch and multiprocessing send TERM to a busy worker and wait for its end, but it ignores TERM.
            worker._popen.terminate = worker._popen.kill
        _iterators.add(iterator)
        return iterator

    DataLoader._get_iterator = protected  # type: ignore[assignment, method-assign]
    atexit.register(_end_workers)
    os.register_at_fork(after_in_child=gc.freeze)


@contextlib.contextmanager
def protected_start(loader: object) -> Iterator[None]:
    """Let a loader's workers that the body starts ignore the stop signals, of a class that starts them in its own way.

    Such as torchdata's StatefulDataLoader.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        yield
        return
    if not isinstance(loader.worker_init_fn, IgnoreStopSignals):
        loader.worker_init_fn = IgnoreStopSignals(loader.worker_init_fn)
    with stop_signals.stop_signals_blocked():  # until the worker ignores them
        yield


def _end_workers() -> None:
    """End the workers of loaders that still exist at the end of the interpreter, as torch ends those of others.

    Later, torch would leave them to multiprocessing and report their end as an error.
    """
    for iterator in list(_iterators):
        iterator._shutdown_workers()
