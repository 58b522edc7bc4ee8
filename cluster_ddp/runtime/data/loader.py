"""torch's DataLoader over a rank's batches, for datasets that are not in memory, with what a training wants of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cluster_ddp.runtime.data.resident import ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Indices
from cluster_ddp.runtime.seeds import seed_all

_MAX_WORKERS = 8  # a default that keeps a GPU busy; more may be asked for


class Loader:
    """Iterates over a rank's batches, epoch by epoch as `batches` says.

    Args:
        dataset: with items by index.
        batches: this rank's.
        device: that the batches are for: a GPU gets pinned ones.
        cpus: of this rank.
        options: for DataLoader, before the defaults: for a GPU, all but one of the CPUs are workers and stay from epoch
            to epoch; a training on CPUs needs them itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: DistributedBatchSampler,
        *,
        device: torch.device,
        cpus: int,
        **options: Any,
    ) -> None:
        on_gpu = device.type == "cuda"
        workers = options.setdefault("num_workers", min(cpus - 1, _MAX_WORKERS) if on_gpu else 0)
        options.setdefault("pin_memory", on_gpu)
        if isinstance(dataset, ResidentSet):
            options.setdefault("collate_fn", _whole)
        if workers:
            options.setdefault("persistent_workers", True)
            dataset = _SeededInWorkers(dataset)
        # A generator of its own: the loader would draw from the rank's, and a resumed run once more than another.
        options.setdefault("generator", torch.Generator().manual_seed(0))
        self._loader: DataLoader[Any] = DataLoader(dataset, **{"batch_sampler": batches, **options})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _SeededInWorkers(Dataset[Any]):
    """A dataset whose random numbers, drawn in a loader's worker, depend on seed, epoch, step and rank alone.

    Else they would depend on how many batches the worker has made since it was started.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Indices) -> Any:
        if get_worker_info() is not None:
            seed_all(indices.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(list(indices))
        return [self.dataset[index] for index in indices]


def _whole(batch: Any) -> Any:
    return batch
