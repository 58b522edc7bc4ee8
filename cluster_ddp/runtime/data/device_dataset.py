"""Datasets of tensors, kept in the memory of the device: each batch is gathered there, without a loader."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.data.shard import DistributedBatchSampler
from cluster_ddp.runtime.model.dtensor_pieces import content

log = logging.getLogger("cluster_ddp")

Batch = tuple[torch.Tensor, ...]

RESIDENT_SHARE = 0.1
"""Default part of a GPU's free memory. The rest is for buckets of gradients, the optimizer and activations."""

_SAMPLES = 64  # of a fingerprint


def _as_they_are(*parts: torch.Tensor) -> Batch:
    return parts


class ResidentSet(Dataset[Batch]):
    """A dataset of tensors, with a function that transforms each batch.

    Args:
        tensors: of any dtype, on one device; the first dimension of each is the number of samples.
        transform: takes a batch of each tensor, on their device, and returns a tuple: the batch to train on. Default:
            returns them unchanged.

    Raises:
        DataError: no tensors, or tensors with different numbers of samples.
    """

    def __init__(self, *tensors: torch.Tensor, transform: Callable[..., Batch] = _as_they_are) -> None:
        sizes = [len(tensor) for tensor in tensors]
        if len(set(sizes)) != 1:
            found = f"they have {sizes} samples." if sizes else "there is none."
            raise DataError("Making a ResidentSet of tensors:", found, "give one or more, with a sample in each row")
        self.tensors, self.transform = tensors, transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> ResidentSet:
        """Return the dataset with its tensors on another device."""
        return ResidentSet(*(tensor.to(device) for tensor in self.tensors), transform=self.transform)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Return the transformed batch of samples by their indices: int64, one dimension, on the tensors' device."""
        return self.transform(*(tensor.index_select(0, indices) for tensor in self.tensors))

    def __getitem__(self, index: int) -> Batch:
        return tuple(part[0] for part in self.batch(torch.tensor([index])))

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a whole batch, for a DataLoader whose collate_fn returns it unchanged."""
        return self.batch(torch.tensor(indices))


class DeviceLoader:
    """Iterates over a rank's batches of the epoch that `batches` is set to. The batches are on the dataset's device."""

    def __init__(self, dataset: ResidentSet, batches: DistributedBatchSampler) -> None:
        self.dataset, self.batches = dataset, batches

    def __iter__(self) -> Iterator[Batch]:
        device = self.dataset.tensors[0].device
        order = self.batches.order().to(device)
        for start, stop in self.batches.shares():
            yield self.dataset.batch(order[start : stop : self.batches.world_size])


def place(dataset: Dataset[Any], device: torch.device, *, share: float, told: bool) -> ResidentSet | None:
    """Return a copy of the dataset on the device, if it is a TensorDataset or `ResidentSet` that fits; else None.

    It may take a `share` (0 to 1) of a GPU's free memory. That it does not fit is logged if `told`.
    """
    if type(dataset) is TensorDataset:  # a subclass may do more
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


def fingerprint(dataset: object) -> str | None:
    """Return what tells datasets of the same size apart, if it is cheap to compute; else None.

    It is the dataset's attribute `fingerprint` or `_fingerprint` (as in Hugging Face's datasets), if that is a str. For
    a TensorDataset or `ResidentSet` it is the SHA-256 (hexadecimal) of dtypes, shapes and 64 evenly spaced samples:
    changes in other samples are not seen. Of a Subset, such as random_split makes, 64 of its indices count.
    """
    for name in ("fingerprint", "_fingerprint"):
        if isinstance(found := getattr(dataset, name, None), str):
            return found
    digest = hashlib.sha256()
    if isinstance(dataset, Subset):
        at = torch.linspace(0, len(dataset) - 1, _SAMPLES if len(dataset) else 0).long().tolist()
        chosen = [int(dataset.indices[row]) for row in at]
        digest.update(f"{len(dataset)} {chosen} {fingerprint(dataset.dataset)}".encode())
        return digest.hexdigest()
    if not isinstance(dataset, (TensorDataset, ResidentSet)):
        return None
    for tensor in dataset.tensors:
        rows = torch.linspace(0, len(tensor) - 1, _SAMPLES if len(tensor) else 0, device=tensor.device).long()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(content(tensor[rows]))
    return digest.hexdigest()
