"""torch's DataLoader over a rank's batches, with defaults for training, for datasets that are not in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cluster_ddp.runtime.data.resident import ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Indices
from cluster_ddp.runtime.seeds import seed_all

_MAX_WORKERS = 8  # a default that keeps a GPU busy; you may set more


class Loader:
    """Iterates over a rank's batches of the epoch that `batches` is set to. The batches are on the CPU.

    Args:
        dataset: a dataset with items by index.
        batches: this rank's sample indices.
        device: the device that the batches are for; for a GPU they are pinned.
        cpus: number of CPUs of this rank.
        options: for DataLoader; they replace these defaults: for a GPU, one worker for each CPU but one, at most 8; on
            a CPU, none, since the training needs the CPUs. Workers are kept from epoch to epoch.
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
        # Its own generator: the loader would draw from the rank's, and in a resumed run once more than in another.
        options.setdefault("generator", torch.Generator().manual_seed(0))
        self._loader: DataLoader[Any] = DataLoader(dataset, **{"batch_sampler": batches, **options})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _SeededInWorkers(Dataset[Any]):
    """A dataset whose random numbers, drawn in a loader's worker, depend on seed, epoch, step and rank only.

    Otherwise they would depend on how many batches the worker has made since its start.
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
