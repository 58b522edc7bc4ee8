"""torch's DataLoader over a rank's batches, with defaults for training, for datasets that are not in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cluster_ddp.errors import check_options
from cluster_ddp.runtime.data import on_gpu
from cluster_ddp.runtime.data.resident import ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Indices
from cluster_ddp.runtime.seeds import seed_all

_MAX_WORKERS = 8  # a default that keeps a GPU busy; you may set more
_SHARED = "ranks share the samples, so world.shard chooses them."
_CHOSEN = {
    "dataset": (_SHARED, "give it first: world.shard(dataset, …)"),
    "shuffle": (_SHARED, "world.shard(…, shuffle_seed=1) shuffles each epoch anew"),
    "batch_sampler": (
        _SHARED,
        "give an epoch's order: world.shard(…, sampler=lambda seed, epoch: indices)",
    ),
}


class Loader:
    """Iterates over a rank's batches of the epoch that `batches` is set to.

    Args:
        dataset: a dataset with items by index.
        batches: this rank's sample indices.
        device: the device that the batches are for; for a GPU they are pinned.
        cpus: number of CPUs of this rank.
        to_device: copy the batches to the device; else they stay on the CPU.
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
        to_device: bool = True,
        **options: Any,
    ) -> None:
        check_options(options, "world.shard(…, {}=…)", DataLoader, chosen=_CHOSEN)
        is_gpu = device.type == "cuda"
        workers = options.setdefault("num_workers", min(cpus - 1, _MAX_WORKERS) if is_gpu else 0)
        options.setdefault("pin_memory", is_gpu)
        if isinstance(dataset, ResidentSet):
            options.setdefault("collate_fn", _whole)
        if workers:
            options.setdefault("persistent_workers", True)
            dataset = _SeededInWorkers(dataset)
        # Its own generator: the loader would draw from the rank's, and in a resumed run once more than in another.
        options.setdefault("generator", torch.Generator().manual_seed(0))
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)
        self._device, self._ahead = device if to_device and is_gpu else None, bool(workers)

    def __iter__(self) -> Iterator[Any]:
        if self._device is None:
            return iter(self._loader)
        # Without workers, the next batch's random numbers would be drawn before this step's: no copy ahead then.
        return on_gpu.copied(self._loader, self._device, ahead=self._ahead)


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
