"""The training data of a world: `shard` for data with an index, `stream` for others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from torch.utils.data import DataLoader, Dataset, IterableDataset

from cluster_ddp.errors import DataError, SpecError, check_options, counted, nearest
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.data.data_loader import MAX_WORKERS, Loader, with_defaults
from cluster_ddp.runtime.data.device_dataset import RESIDENT_SHARE, DeviceLoader, fingerprint, place
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Order, Shard
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import StreamReader
from cluster_ddp.runtime.data.uneven_inputs import Split
from cluster_ddp.runtime.device import device as devices
from cluster_ddp.slurm.variables import Variables

log = logging.getLogger("cluster_ddp")

# With split="items" each worker reads all items: more than one would read them once more.
_MOST_WORKERS = {"items": 1, "own": MAX_WORKERS}
_SPLIT_THEMSELVES = ("datasets", "streaming", "webdataset")  # packages whose iterables look for their worker
_ORDERED = "the stream has the iterable's order."
_SHUFFLE = "let the iterable shuffle: by set_epoch(epoch), or with torch's, Python's or NumPy's generators"
_CHOSEN = {
    "dataset": ("the iterable is the dataset.", "give it first: world.stream(iterable, …)"),
    **dict.fromkeys(("shuffle", "sampler", "batch_sampler"), (_ORDERED, _SHUFFLE)),
    "in_order": ("the batches must come in order.", "leave it out"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldData(Collectives):
    """Each rank's share of a dataset."""

    def shard(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle_seed: int | None = None,
        sampler: Order | None = None,
        drop_last: bool = False,
        to_device: bool = True,
        resident_share: float = RESIDENT_SHARE,
        **loader_options: Any,
    ) -> Shard:
        """Return this rank's batches of a dataset, on its device. In each epoch, every sample is on exactly one rank.

        A TensorDataset or `ResidentSet` that fits is kept on the device, and its batches are made there. Others, and
        those with loader options, use torch's DataLoader, which copies its batches there.

        Args:
            dataset: a dataset with a length and items by index.
            batch_size: samples per rank and step; with `global_batch`, the most. An epoch's last may be one larger.
            global_batch: samples of an update on all ranks together. `Models.accumulate` says more, and has the loop.
                With `--restarts`, a start after a GPU ran out of memory has batches that are half as large.
            shuffle_seed: random seed for shuffling each epoch (`Shard.set_epoch`); None keeps the dataset's order.
            sampler: function of the seed (`shuffle_seed`, or 0) and the epoch, the same on every rank. It returns the
                indices of the epoch's samples in order, as many in each epoch; it may repeat samples.
            drop_last: leave out an epoch's last batches if they are smaller than the others.
            to_device: False leaves a DataLoader's batches on the CPU.
            resident_share: the part (0 to 1) of a GPU's free memory that a dataset kept there may take; 0 keeps none.
            loader_options: for torch's DataLoader (num_workers, collate_fn …); see `Loader` for the defaults.

        Raises:
            DataError: a batch is below 1; no length, or no samples; or a rank would be without samples in training.
            SpecError: DataLoader has no such option, or `shard` chooses it.
        """
        size = epoch_size(dataset, sampler, shuffle_seed, self.world_size)
        if global_batch is not None:
            batch_size = self._batch_size_in_memory(batch_size, global_batch)
        order: dict[str, Any] = {"seed": shuffle_seed, "sampler": sampler, "drop_last": drop_last}
        order |= {"rank": self.rank, "world_size": self.world_size, "global_batch": global_batch}
        batches = DistributedBatchSampler(size, batch_size, **order)
        source = self._source(dataset, batches, loader_options, share=resident_share, to_device=to_device)
        return Shard(batches, source, fingerprint=fingerprint(dataset), dataset=dataset)

    def _batch_size_in_memory(self, batch_size: int | None, global_batch: int) -> int | None:
        """Return the batch size, or a smaller one if the memory of a GPU was too small for it in an earlier start."""
        share = -(-global_batch // self.world_size)
        asked = min(batch_size or share, share)
        most = Variables(os.environ).integer(Env.MICRO_BATCH) or asked
        if most >= asked:
            return batch_size
        if self.is_main:
            log.warning(
                "Micro-batches of %d samples in place of %d: %d per update. GPU memory was too small before.",
                *(most, asked, -(-share // most)),
            )
        return most

    def _source(
        self,
        dataset: Dataset[Any],
        batches: DistributedBatchSampler,
        loader_options: dict[str, Any],
        *,
        share: float,
        to_device: bool,
    ) -> DeviceLoader | Loader:
        if not loader_options and (resident := place(dataset, self.device, share=share, told=self.is_main)):
            return DeviceLoader(resident, batches)
        way: dict[str, Any] = {"device": self.device, "cpus": devices.cpus(self.topology), "to_device": to_device}
        return Loader(dataset, batches, **way, **loader_options)

    def stream(
        self,
        iterable: Iterable[Any],
        *,
        batch_size: int | None,
        split: Split | None = None,
        seed: int = 0,
        drop_last: bool = False,
        replay: bool = False,
        to_device: bool = True,
        **loader_options: Any,
    ) -> Stream:
        """Return this rank's batches of data without a length or an index, on its device: use it as a `Shard`.

        Args:
            iterable: its __iter__ begins an epoch anew; set_epoch(epoch) is called before, if it has that. If it has
                state_dict() and load_state_dict(), a resume loads its state; else it reads the items before again.
            batch_size: samples per rank and step; None if the iterable gives batches, as a loader does.
            split: "items": each rank takes every `world_size`-th item, and all of them read all items. "own": the
                iterable gives each rank and worker its own share. Default: "own" with batch_size=None and for the
                iterables of Hugging Face's datasets, WebDataset and MosaicML's streaming; else "items".
            seed: random seed of what the iterable draws from torch's, Python's and NumPy's generators on the CPU.
            drop_last: leave out batches that are smaller than the others.
            replay: let a resume read the items before again, although the iterable has a state.
            to_device: False leaves the batches on the CPU.
            loader_options: for torch's DataLoader. By default a rank on a GPU has one worker with "items", with "own"
                one for each CPU but one, at most 8; without a GPU, or with batch_size=None, it has none.

        Raises:
            DataError: `batch_size` is below 1, or does not fit the iterable; or that can be read once only.
            SpecError: DataLoader has no such option, or `stream` chooses it; there is no such `split`.
        """
        split = _checked_split(iterable, batch_size, split, loader_options, self.world_size)
        device = self.device if to_device and self.device.type == "cuda" else None
        cpus = devices.cpus(self.topology) if device is not None and batch_size is not None else 1
        workers = with_defaults(loader_options, workers=min(cpus - 1, _MOST_WORKERS[split]), is_gpu=device is not None)
        loader_options.setdefault("persistent_workers", workers > 0)
        given: dict[str, Any] = {"batch_size": batch_size, "split": split, "drop_last": drop_last, "replay": replay}
        given |= {"seed": seed, "rank": self.rank, "world_size": self.world_size}
        reader = StreamReader(iterable, collate=loader_options.pop("collate_fn", None), **given)
        return Stream(reader, device=device, **loader_options)


def epoch_size(dataset: Dataset[Any], sampler: object, seed: int | None, ranks: int) -> int:
    """Return the number of samples in an epoch.

    Raises:
        DataError: the dataset has no length, as an IterableDataset; the sampler is one of torch's; there are no
            samples; or, with a seed, there are fewer samples than ranks.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        found = "it has no length and no index, so its place in an epoch can't be shared or resumed."
        hint = "world.stream(dataset, batch_size=…) reads it in its own order; or give it __len__ and __getitem__"
        raise DataError(f"Sharing a {type(dataset).__name__} among ranks:", found, hint)
    if sampler is not None and not callable(sampler):
        found = "its order does not follow from a seed and an epoch, so ranks would differ, and none could resume."
        hint = "give a function: sampler=lambda seed, epoch: indices"
        raise DataError(f"Sharing samples by a {type(sampler).__name__}:", found, hint)
    asked = f"Sharing a {type(dataset).__name__} among {counted(ranks, 'rank')}:"
    if len(dataset) == 0:
        raise DataError(asked, "the dataset is empty.", "is its path right? See what is there: ls -l PATH")
    size = len(dataset if sampler is None else sampler(seed or 0, 0))
    if size == 0:
        raise DataError(asked, "the sampler gave no indices for epoch 0.", "return the indices of the epoch's samples")
    if seed is not None and size < ranks:
        found = "a rank without samples can't take part in training."
        raise DataError(f"Sharing {size} samples among {ranks} ranks:", found, f"use at most {size} GPUs")
    return size


def splits_itself(iterable: object) -> bool:
    """Whether an iterable is of a library whose iterables give each worker a share of its own."""
    return any(base.__module__.partition(".")[0] in _SPLIT_THEMSELVES for base in type(iterable).__mro__)


def _checked_split(
    iterable: Any, batch_size: int | None, split: Split | None, options: dict[str, Any], world_size: int
) -> Split:
    """How a stream is split. Checks that it can be."""
    check_options(options, "world.stream(…, {}=…)", DataLoader, chosen=_CHOSEN)
    asked = f"Streaming a {type(iterable).__name__}:"
    if not hasattr(iterable, "__iter__"):
        raise DataError(asked, "it can't be iterated over.", "give an object with __iter__; with an index: world.shard")
    if isinstance(iterable, Iterator):
        hint = "give an object whose __iter__ begins anew, such as an IterableDataset"
        raise DataError(asked, "it can be read once only, and each epoch and each resume reads it anew.", hint)
    if batch_size is not None and batch_size < 1:
        raise DataError(f"Batches of {batch_size} samples:", "a batch has 1 or more.", "batch_size=64")
    if isinstance(iterable, DataLoader) and batch_size is not None:
        raise DataError(f"{asked[:-1]} with batch_size={batch_size}:", "it makes batches itself.", "batch_size=None")
    if split not in (None, *get_args(Split)):
        found = f"there is no such way.{nearest(str(split), get_args(Split))}"
        raise SpecError(f"Streaming with split={split!r}:", found, 'split="items" or split="own"')
    if batch_size is None and split == "items":
        found = "the iterable gives batches, not items that could be dealt."
        raise SpecError('Streaming with batch_size=None and split="items":', found, "give a batch_size")
    if isinstance(iterable, DataLoader) and (workers := options.get("num_workers")):
        found = "a loader has its own workers, and a worker can't have any."
        hint = f"{type(iterable).__name__}(…, num_workers={workers})"
        raise SpecError(f"Streaming a loader with num_workers={workers}:", found, hint)
    split = split or ("own" if batch_size is None or splits_itself(iterable) else "items")
    # A dataset of Hugging Face gives each worker a share by itself, but each rank only if it was told to.
    if split == "own" and world_size > 1 and getattr(iterable, "_distributed", iterable) is None:
        raise DataError(
            f"Streaming a {type(iterable).__name__} on {world_size} ranks:",
            "it was not split by rank: each rank would train on all samples.",
            "datasets.distributed.split_dataset_by_node(dataset, rank=world.rank, world_size=world.world_size)",
        )
    return split
