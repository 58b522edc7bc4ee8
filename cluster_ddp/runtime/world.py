"""The world of ranks, inside a training script (see `distributed` for how it is joined and left):

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
    """What this rank computes on."""
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S
    """Seconds that a rank may let the others wait."""
    peer_failed: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether another rank is known to have failed."""
    key: RunKey = field(default_factory=RunKey.of_one_process, repr=False)
    """What only the ranks of this run have."""

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
        """Print on rank 0 only, at once. Others speak through logging.getLogger("cluster_ddp")."""
        if self.is_main:
            say(text)

    def barrier(self) -> None:
        """Wait until all ranks are here, and their devices have done what they were given."""
        self.synchronize()
        process_group.barrier()

    def synchronize(self) -> None:
        """Wait until this rank's device has done all that it was given; on a CPU nothing is waited for.

        Use it before what would block until then (`tensor.item()`, `tensor.cpu()`): it lets signals through, and ends
        with an error where other ranks have failed or hang.

        Raises:
            DeviceTimeoutError: after `collective_timeout_s` seconds.
            PeerFailedError: another rank failed.
        """
        nonblocking_wait.for_device(self.device, timeout_s=self.collective_timeout_s, peer_failed=self.peer_failed)

    def watch_stream(self, stream: torch.cuda.Stream) -> None:
        """Count work on a CUDA stream of your own as this rank's.

        A rank that has work to do when another one fails is ended: the work may be a collective, which would wait for
        ever. Only the default stream is known otherwise.
        """
        streams.watch(stream)

    def before_leaving(self, function: Callable[[], object]) -> None:
        """Call a function when all ranks leave the world, before the process group ends.

        Reset CUDA graphs with collectives there: NCCL waits without a limit for the end of every graph that uses a
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        process_group.before_leaving.append(function)

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """The sums of some values over all ranks, the same on every rank. A collective: all ranks must call it.

        Args:
            values: numbers or one-element tensors of this rank.

        Returns:
            As many sums, exact as float64.
        """
        self.synchronize()  # a number's way to the device would block until then
        mine = [torch.as_tensor(value, dtype=torch.float64).reshape(()) for value in values]
        total = torch.stack([value.to(self.device) for value in mine])
        dist.all_reduce(total)
        self.synchronize()
        return [float(value) for value in total.tolist()]

    def mean(self, total: float | torch.Tensor, count: float | torch.Tensor) -> float:
        """The mean over all ranks of something that each has summed up: sum of totals over sum of counts.

        Raises:
            DataError: nothing was counted anywhere.
        """
        all_total, all_count = self.sum(total, count)
        if all_count == 0:
            raise DataError("A mean over all ranks:", "no rank counted any sample.", "is the dataset empty?")
        return all_total / all_count

    def gather(self, value: T) -> list[T]:
        """Every rank's value in the order of ranks, on every rank. A collective.

        Objects that are no plain data or tensors are pickled. That takes a secret of the ranks (see `messages`).
        """
        return object_collectives.all_gather(value, self.key)

    def gather_to_main(self, value: T) -> list[T] | None:
        """The same on rank 0 only, which takes as much memory for each rank as the largest value has; else None."""
        return object_collectives.gather(value, self.key)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank. A collective; the value as of `gather`."""
        return object_collectives.broadcast(value, self.key)  # type: ignore[no-any-return]  # of the type that rank 0 gave

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """The model under DDP, on this rank's device.

        Gradients are views into the communication buckets: no memory is taken for them twice. (`zero_grad()`, which
        sets them to None, lets each step copy them there; that was 3 % faster than adding them to zeros.) The buckets'
        final layout is settled here, not in the first step, so that a training that is resumed adds up gradients in the
        same order.
        """
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model.to(self.device), device_ids=device_ids, gradient_as_bucket_view=True)
        # In every hundredth step DDP would take its times, for which it waits for the device, and which no graph
        # captures.
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
        """This rank's batches of a dataset: every sample on exactly one rank in each epoch.

        A TensorDataset or `ResidentSet` for which there is room is kept on the device, and its batches are made there.
        Others, and those with loader options, go through torch's DataLoader: its batches are the CPU's.

        Args:
            dataset: with a length and items by index.
            batch_size: samples per rank and step.
            shuffle_seed: reshuffles each epoch (`Shard.set_epoch`); None keeps the dataset's order.
            resident_share: how much of a GPU's free memory a dataset kept on it may take; 0 keeps none there.
            loader_options: for torch's DataLoader (num_workers, collate_fn …); see `loader.Loader` for the defaults.

        Raises:
            DataError: shuffling, that is training, fewer samples than ranks.
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
        """Give this rank random numbers of its own (torch's, Python's, NumPy's); call it after building the model."""
        seed_all(stream_seed(seed, self.rank))
