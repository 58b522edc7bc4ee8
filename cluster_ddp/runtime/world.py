"""The world of ranks in a training script (`distributed` joins and leaves it):

with cluster_ddp.distributed() as world:
    model = world.wrap(Model().to(world.device))
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        for images, labels in shard: ...
    accuracy = world.mean(correct, seen)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from cluster_ddp.errors import DataError
from cluster_ddp.runtime import object_collectives, process_group
from cluster_ddp.runtime.data.fingerprint import fingerprint
from cluster_ddp.runtime.data.loader import Loader
from cluster_ddp.runtime.data.resident import RESIDENT_SHARE, DeviceLoader, place
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Shard
from cluster_ddp.runtime.ddp_buckets import prebuild_ddp_buckets
from cluster_ddp.runtime.device import device as devices
from cluster_ddp.runtime.device import nonblocking_wait, streams
from cluster_ddp.runtime.output import say
from cluster_ddp.runtime.rendezvous.secret import RunKey
from cluster_ddp.runtime.seeds import seed_all, stream_seed
from cluster_ddp.slurm.topology import Topology

T = TypeVar("T")

DEFAULT_COLLECTIVE_TIMEOUT_S = 600.0
_NEVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All ranks of the run, seen from one of them."""

    topology: Topology
    """This rank's place."""
    device: torch.device
    """The device of this rank."""
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S
    """Seconds to wait for the other ranks in a collective."""
    peer_failed: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether another rank is known to have failed."""
    key: RunKey = field(default_factory=RunKey.of_one_process, repr=False)
    """The key that only the ranks of this run have."""

    @property
    def rank(self) -> int:
        """0 … world_size - 1."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def print(self, text: str) -> None:
        """Print a line at once, on rank 0 only. On other ranks use logging.getLogger("cluster_ddp")."""
        if self.is_main:
            say(text)

    def barrier(self) -> None:
        """Wait until all ranks are here and their devices have finished their work. A collective.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
            RuntimeError: gloo: a rank did not come in time or is gone.
        """
        self.synchronize()
        process_group.barrier()

    def synchronize(self) -> None:
        """Wait until this rank's GPU has finished the work of the current stream; on a CPU return at once.

        Use it before calls that would block until then (`tensor.item()`, `tensor.cpu()`). It lets signal handlers run,
        and raises an error if other ranks have failed or hang.

        Raises:
            DeviceTimeoutError: the device was not done after `collective_timeout_s` seconds; a RuntimeError.
            PeerFailedError: another rank failed; a RuntimeError.
        """
        nonblocking_wait.for_device(self.device, timeout_s=self.collective_timeout_s, peer_failed=self.peer_failed)

    def watch_stream(self, stream: torch.cuda.Stream) -> None:
        """Watch a CUDA stream of your own for unfinished work. Otherwise only the default stream is watched.

        When another rank fails, a rank with unfinished work is ended: the work may be a collective that waits forever.
        """
        streams.watch(stream)

    def before_leaving(self, function: Callable[[], object]) -> None:
        """Call a function when all ranks leave the world, before the process group ends. Last in, first out.

        Reset CUDA graphs that contain collectives there: NCCL waits without a limit for every graph that uses a
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        process_group.before_leaving.append(function)

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Add up values over all ranks. A collective: all ranks must call it, with as many values.

        Args:
            values: numbers or one-element tensors of this rank.

        Returns:
            One sum for each value, computed in float64; the same on every rank.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        self.synchronize()  # copying a number to the device would block until then
        mine = [torch.as_tensor(value, dtype=torch.float64).reshape(()) for value in values]
        total = torch.stack([value.to(self.device) for value in mine])
        dist.all_reduce(total)
        self.synchronize()
        return [float(value) for value in total.tolist()]

    def mean(self, total: float | torch.Tensor, count: float | torch.Tensor) -> float:
        """Return the sum of `total` over all ranks, divided by the sum of `count`. A collective.

        Args:
            total: this rank's sum: a number or one-element tensor.
            count: its number of samples: a number or one-element tensor.

        Raises:
            DataError: the counts of all ranks are 0.
        """
        all_total, all_count = self.sum(total, count)
        if all_count == 0:
            raise DataError("A mean over all ranks:", "no rank counted any sample.", "is the dataset empty?")
        return all_total / all_count

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks, on every rank. A collective.

        Objects other than plain data and tensors are pickled, which needs a secret (see `object_collectives`).

        Raises:
            ClusterDDPError: a value must be pickled, and the ranks share no secret.
        """
        return object_collectives.all_gather(value, self.key)

    def gather_to_main(self, value: T) -> list[T] | None:
        """Return the same as `gather` on rank 0, None on other ranks. A collective.

        For each rank, rank 0 needs as much memory as the largest value.
        """
        return object_collectives.gather(value, self.key)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. A collective; values and errors as for `gather`."""
        return object_collectives.broadcast(value, self.key)  # type: ignore[no-any-return]  # of the type that rank 0 gave

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Move a model to this rank's device and wrap it in DistributedDataParallel. A collective.

        Gradients are views into the communication buckets and need no memory of their own. (`zero_grad()`, which sets
        them to None, lets each step copy them there; that was 3 % faster than adding them to zeros.) The final layout
        of the buckets is made here, not in the first step, so that a resumed training adds up gradients in the same
        order.
        """
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model.to(self.device), device_ids=device_ids, gradient_as_bucket_view=True)
        # In every hundredth step DDP would measure times: it waits for the device then, and no graph can capture that.
        wrapped._set_ddp_runtime_logging_sample_rate(_NEVER)
        prebuild_ddp_buckets(wrapped)
        return wrapped

    def shard(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        resident_share: float = RESIDENT_SHARE,
        **loader_options: Any,
    ) -> Shard:
        """Return this rank's batches of a dataset. In each epoch, every sample is on exactly one rank.

        A TensorDataset or `ResidentSet` that fits is kept on the device, and its batches are made there. Other
        datasets, and those with loader options, use torch's DataLoader: their batches are on the CPU.

        Args:
            dataset: a dataset with a length and items by index.
            batch_size: samples per rank and step. An epoch's last batch may be smaller, or one larger.
            shuffle_seed: random seed for shuffling each epoch (`Shard.set_epoch`); None keeps the dataset's order.
            resident_share: the part (0 to 1) of a GPU's free memory that a dataset kept there may take; 0 keeps none.
            loader_options: for torch's DataLoader (num_workers, collate_fn …); see `loader.Loader` for the defaults.

        Raises:
            DataError: `batch_size` is below 1; or, with a shuffle seed, there are fewer samples than ranks.
        """
        size = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no __len__
        if shuffle_seed is not None and size < self.world_size:
            raise DataError(
                f"Sharing {size} samples among {self.world_size} ranks:",
                "a rank without samples can't take part in training.",
                f"use at most {size} GPUs",
            )
        batches = DistributedBatchSampler(
            size, batch_size, rank=self.rank, world_size=self.world_size, seed=shuffle_seed
        )
        if not loader_options and (resident := place(dataset, self.device, share=resident_share, told=self.is_main)):
            return Shard(batches, DeviceLoader(resident, batches), fingerprint=fingerprint(dataset))
        loader = Loader(dataset, batches, device=self.device, cpus=devices.cpus(self.topology), **loader_options)
        return Shard(batches, loader, fingerprint=fingerprint(dataset))

    def seed_rank(self, seed: int) -> None:
        """Seed this rank's generators (torch, Python, NumPy) differently from other ranks'.

        Args:
            seed: random seed of the run, the same on all ranks. Call this after building the model.
        """
        seed_all(stream_seed(seed, self.rank))
