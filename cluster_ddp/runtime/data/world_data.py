"""The training data of a world: `shard` for data with an index, `stream` for others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from cluster_ddp.errors import DataError, counted
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.data import stream_setup
from cluster_ddp.runtime.data.data_loader import Loader
from cluster_ddp.runtime.data.device_dataset import RESIDENT_SHARE, DeviceLoader, fingerprint, place
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Order, Shard
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import Split
from cluster_ddp.runtime.device import device as devices


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
        order: dict[str, Any] = {"seed": shuffle_seed, "sampler": sampler, "drop_last": drop_last}
        order |= {"rank": self.rank, "world_size": self.world_size, "global_batch": global_batch}
        batches = DistributedBatchSampler(size, batch_size, **order)
        source = self._source(dataset, batches, loader_options, share=resident_share, to_device=to_device)
        return Shard(batches, source, fingerprint=fingerprint(dataset))

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
        given: dict[str, Any] = {"batch_size": batch_size, "split": split, "seed": seed}
        ends: dict[str, Any] = {"drop_last": drop_last, "replay": replay}
        device = self.device if to_device and self.device.type == "cuda" else None
        place: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, "device": device}
        return stream_setup.make(
            iterable, **given, **ends, **place, cpus=devices.cpus(self.topology), options=loader_options
        )


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
