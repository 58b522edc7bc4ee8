"""Datasets that are tensors in memory: kept on the device, where each batch is gathered at once, without a loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from cluster_ddp.runtime.data.shard import DistributedBatchSampler

log = logging.getLogger("cluster_ddp")

Batch = tuple[torch.Tensor, ...]

RESIDENT_SHARE = 0.1
"""Of a GPU's free memory. The rest is for gradients' buckets, the optimizer and activations, which come later."""


def _as_they_are(*parts: torch.Tensor) -> Batch:
    return parts


class ResidentSet(Dataset[Batch]):
    """Samples as tensors, and what is to be done with a batch of them.

    Args:
        tensors: of any dtype and device, all with one entry for each sample along their first dimension.
        transform: takes a batch of each tensor, on their device, and returns the batch to train on.
    """

    def __init__(self, *tensors: torch.Tensor, transform: Callable[..., Batch] = _as_they_are) -> None:
        assert len({len(tensor) for tensor in tensors}) == 1, "the tensors have different numbers of samples"
        self.tensors, self.transform = tensors, transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> ResidentSet:
        """The same on another device."""
        return ResidentSet(*(tensor.to(device) for tensor in self.tensors), transform=self.transform)

    def batch(self, indices: torch.Tensor) -> Batch:
        """The samples with these numbers (int64, one dimension, on the tensors' device)."""
        return self.transform(*(tensor.index_select(0, indices) for tensor in self.tensors))

    def __getitem__(self, index: int) -> Batch:
        return tuple(part[0] for part in self.batch(torch.tensor([index])))

    def __getitems__(self, indices: list[int]) -> Batch:
        """A whole batch, for a DataLoader whose collate_fn leaves it as it is."""
        return self.batch(torch.tensor(indices))


class DeviceLoader:
    """A rank's batches of a resident set, epoch by epoch as `batches` says."""

    def __init__(self, dataset: ResidentSet, batches: DistributedBatchSampler) -> None:
        self.dataset, self.batches = dataset, batches

    def __iter__(self) -> Iterator[Batch]:
        device = self.dataset.tensors[0].device
        order = self.batches.order().to(device)
        for start, stop in self.batches.shares():
            yield self.dataset.batch(order[start : stop : self.batches.world_size])


def place(dataset: Dataset[Any], device: torch.device, *, share: float, told: bool) -> ResidentSet | None:
    """The dataset on the device, if it is one of tensors and there is room for it; else None.

    Args:
        dataset: any.
        device: this rank's.
        share: of a GPU's free memory, how much it may take.
        told: whether to say that there is no room.
    """
    if type(dataset) is TensorDataset:  # a class derived from it may do more
        dataset = ResidentSet(*dataset.tensors)
    if not isinstance(dataset, ResidentSet):
        return None
    if device.type == "cuda" and dataset.nbytes > share * (free := torch.cuda.mem_get_info(device)[0]):
        if told:
            log.info(
                "The dataset stays in the host's memory: %.2f GB are more than %g of the %.2f GB that are free on %s "
                "(resident_share=%g). A DataLoader makes its batches.",
                *(dataset.nbytes / 1e9, share, free / 1e9, device, share),
            )
        return None
    return dataset.to(device)
