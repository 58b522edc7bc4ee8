"""The world of ranks in a training script (`distributed` joins and leaves it):

with cluster_ddp.distributed() as world:
    model = world.wrap(Model().to(world.device))
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        for images, labels in shard: ...
    accuracy = world.mean(correct, seen)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.collectives import Collectives
from cluster_ddp.runtime.console import say
from cluster_ddp.runtime.data.data_loader import Loader
from cluster_ddp.runtime.data.device_dataset import RESIDENT_SHARE, DeviceLoader, fingerprint, place
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Order, Shard, epoch_size
from cluster_ddp.runtime.device import device as devices
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.model import ddp
from cluster_ddp.runtime.rng import seed_all, stream_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class World(Collectives):
    """All ranks of the run, seen from one of them. Collectives are in `Collectives`."""

    run_log: list[Callable[[str, Mapping[str, Any]], None]] = field(default_factory=list, repr=False)
    """`RunDir.log` of the newest run directory; empty before there is one."""

    if not TYPE_CHECKING:  # type checkers know the names

        def __getattr__(self, name: str) -> object:
            """Suggest the right name for a common wrong one, world_size for size. Python suggests for typos."""
            longer = [known for known in dir(type(self)) if not known.startswith("_") and name in known]
            meant = f". Did you mean {min(longer, key=len)}?" if longer else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant}")

    def log(self, kind: str, /, **values: Any) -> None:
        """Append a record to metrics.jsonl in the run directory, on rank 0, in the background.

        `status` shows the newest `epoch` and `samples_per_s`, and the newest `accuracy` that is not a "train" record's.

            world.log("train", epoch=epoch, loss=loss, samples_per_s=shard.samples_per_s)
            world.log("test", epoch=epoch, accuracy=accuracy)

        Args:
            kind: "train", "test", or one of your own.
            values: numbers, text, lists and dictionaries of them; tensors of one element. Reading a tensor waits for
                its device.

        Raises:
            SpecError: there is no run directory yet, or a value is of another type.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
            RunDirError: more than 256 MiB of records are waiting to be written.
        """
        if not self.run_log:
            hint = "make the Checkpointer before, or without one: cluster_ddp.RunDir(None, world)"
            raise SpecError(f"Logging a {kind!r} record:", "there is no run directory yet.", hint)
        if self.is_main and any(isinstance(value, torch.Tensor) for value in values.values()):
            self.synchronize()
        self.run_log[0](kind, values)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print at once, on rank 0 only, as Python's print. On other ranks use logging.getLogger("cluster_ddp")."""
        if self.is_main:
            say(sep.join(map(str, values)), end=end)

    def watch_stream(self, stream: torch.cuda.Stream) -> None:
        """Watch a CUDA stream of your own for unfinished work. Otherwise only the default stream is watched.

        When another rank fails, a rank with unfinished work is ended: the work may be a collective that waits forever.
        """
        interruptible_wait.watch(stream)

    def before_leaving(self, function: Callable[[], object]) -> None:
        """Call a function when all ranks leave the world, before the process group ends. Last in, first out.

        Reset CUDA graphs that contain collectives there: NCCL waits without a limit for every graph that uses a
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        process_group.before_leaving.append(function)

    def wrap(
        self, model: torch.nn.Module, *, sync_batchnorm: bool = False, place: bool = True, **ddp_options: Any
    ) -> DistributedDataParallel:
        """Move a model to this rank's device and wrap it in DistributedDataParallel. A collective.

        Gradients are views into the communication buckets and need no memory of their own. (`zero_grad()`, which sets
        them to None, lets each step copy them there; that was 3 % faster than adding them to zeros.) The final layout
        of the buckets is made here, not in the first step, so that a resumed training adds up gradients in the same
        order (but with static_graph=True, on more than two ranks).

        Args:
            model: the model. torch.compile may be applied to it before or after.
            sync_batchnorm: on GPUs, let BatchNorm use the statistics of all ranks' batches.
            place: False leaves the parameters where they are, for a model on several devices.
            ddp_options: for DistributedDataParallel: find_unused_parameters, static_graph, bucket_cap_mb …

        Raises:
            SpecError: DistributedDataParallel has no such option.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        if sync_batchnorm and self.device.type == "cpu":  # torch has SyncBatchNorm for GPUs only
            self.print("SyncBatchNorm needs GPUs: on CPUs each rank's BatchNorm uses its own batch.")
        elif sync_batchnorm:
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return ddp.wrap(model, self.device, place=place, options=ddp_options, synchronize=self.synchronize)

    def accumulate(
        self, model: DistributedDataParallel, batch: Shard | int, *, every: int
    ) -> AbstractContextManager[bool]:
        """Return a context for forward and backward of one batch of a group that makes one update.

        Gradients are added up over the ranks in the group's last batch only, for which the context's value is True:

            with world.accumulate(model, shard, every=4) as is_last:
                (loss(model(images), labels) / 4).backward()
            if is_last:
                optimizer.step(); optimizer.zero_grad(); checkpoint.step()

        Args:
            model: from `wrap`.
            batch: the shard that the batch is from: its epoch's last group may be smaller. Or, without one, the number
                of the batch, from 0.
            every: number of batches of one update.

        Raises:
            SpecError: `every` is below 1, or the model is not wrapped.
        """
        return ddp.accumulate(model, batch, every=every)

    def share_buffers(self, model: DistributedDataParallel) -> None:
        """Give all ranks rank 0's buffers, such as the statistics of batch normalisation. A collective.

        DDP does so before each forward pass in training mode. Call it before a test or at the end: since then, each
        rank's statistics are its own.

        Args:
            model: from `wrap`.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        if buffers := list(model.module.buffers()):
            self.synchronize()
            for buffer, value in zip(buffers, self.broadcast([buffer.cpu() for buffer in buffers])):
                buffer.copy_(value)

    def weights_digest(self, model: DistributedDataParallel) -> str:
        """Return the SHA-256 of a model's parameters and buffers, the same on all ranks. A collective.

        Args:
            model: from `wrap`.

        Raises:
            RuntimeError: the ranks have different weights.
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        self.synchronize()
        digests = self.gather(ddp.digest(model))
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks ended with different weights: {digests}")
        return digests[0]

    def autocast(self, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
        """Return torch's context for mixed precision on this rank's device.

        Args:
            dtype: torch.bfloat16; or, on GPUs, torch.float16, with `grad_scaler`.
        """
        return torch.autocast(self.device.type, dtype)

    def grad_scaler(self, dtype: torch.dtype) -> torch.amp.GradScaler:
        """Return a GradScaler, enabled for torch.float16 only. Name it in `Checkpointer`, too: it has a state."""
        return torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)

    def shard(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        sampler: Order | None = None,
        drop_last: bool = False,
        to_device: bool = True,
        resident_share: float = RESIDENT_SHARE,
        **loader_options: Any,
    ) -> Shard:
        """Return this rank's batches of a dataset, on its device. In each epoch, every sample is on exactly one rank.

        A TensorDataset or `ResidentSet` that fits is kept on the device, and its batches are made there. Other
        datasets, and those with loader options, use torch's DataLoader, which copies its batches there.

        Args:
            dataset: a dataset with a length and items by index.
            batch_size: samples per rank and step. An epoch's last batch may be smaller, or one larger.
            shuffle_seed: random seed for shuffling each epoch (`Shard.set_epoch`); None keeps the dataset's order.
            sampler: a function of the seed (`shuffle_seed`, or 0) and the epoch, the same on every rank. It returns
                the indices of the epoch's samples in order, as many in each epoch; it may repeat samples.
            drop_last: leave out an epoch's last batches if they are smaller than the others.
            to_device: False leaves a DataLoader's batches on the CPU.
            resident_share: the part (0 to 1) of a GPU's free memory that a dataset kept there may take; 0 keeps none.
            loader_options: for torch's DataLoader (num_workers, collate_fn …); see `Loader` for the defaults.

        Raises:
            DataError: `batch_size` is below 1; no length, or no samples; or, with a shuffle seed, fewer samples than
                ranks.
            SpecError: DataLoader has no such option, or `shard` chooses it.
        """
        size = epoch_size(dataset, sampler, shuffle_seed, self.world_size)
        order: dict[str, Any] = {"seed": shuffle_seed, "sampler": sampler, "drop_last": drop_last}
        batches = DistributedBatchSampler(size, batch_size, rank=self.rank, world_size=self.world_size, **order)
        if not loader_options and (resident := place(dataset, self.device, share=resident_share, told=self.is_main)):
            return Shard(batches, DeviceLoader(resident, batches), fingerprint=fingerprint(dataset))
        way: dict[str, Any] = {"device": self.device, "cpus": devices.cpus(self.topology), "to_device": to_device}
        return Shard(batches, Loader(dataset, batches, **way, **loader_options), fingerprint=fingerprint(dataset))

    def seed_rank(self, seed: int) -> None:
        """Seed this rank's generators (torch, Python, NumPy) differently from other ranks'.

        Args:
            seed: random seed of the run, the same on all ranks. Call this after building the model.
        """
        seed_all(stream_seed(seed, self.rank))
