"""The world of ranks, inside a training script:

with cluster_ddp.distributed() as world:
    model = world.wrap(Model().to(world.device))
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        for images, labels in shard: ...
    accuracy = world.mean(correct, seen)
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from cluster_ddp.errors import DataError
from cluster_ddp.runtime import device as devices
from cluster_ddp.runtime import rendezvous
from cluster_ddp.runtime.buckets import settle_buckets
from cluster_ddp.runtime.data.loader import Loader
from cluster_ddp.runtime.data.resident import Gathered, place
from cluster_ddp.runtime.data.shard import GlobalBatches, Shard
from cluster_ddp.runtime.failure import FailureReporter
from cluster_ddp.runtime.memory import keep_freed
from cluster_ddp.runtime.network import interface_towards
from cluster_ddp.runtime.output import say
from cluster_ddp.runtime.preemption import Stopped
from cluster_ddp.runtime.seeds import seed_all, stream_seed
from cluster_ddp.slurm.environment import Topology

log = logging.getLogger("cluster_ddp")

T = TypeVar("T")

DEFAULT_COLLECTIVE_TIMEOUT_S = 600.0

# gloo's threads let go of the last tensors a little after a collective has ended. Where that falls into the end of the
# interpreter, Python aborts the process ("terminate called without an active exception", torch 2.10 to 2.15).
_GLOO_SETTLES_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All ranks of the run, seen from one of them."""

    topology: Topology
    """This rank's place."""
    device: torch.device
    """What this rank computes on."""

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
        """Wait until all ranks are here."""
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """The sums of some values over all ranks, the same on every rank. A collective: all ranks must call it.

        Args:
            values: numbers or one-element tensors of this rank.

        Returns:
            As many sums, exact as float64.
        """
        mine = [torch.as_tensor(value, dtype=torch.float64).reshape(()) for value in values]
        total = torch.stack([value.to(self.device) for value in mine])
        dist.all_reduce(total)
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
        """Every rank's value in the order of ranks, on every rank. A collective; values are pickled."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all are filled now

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """The model under DDP, on this rank's device.

        Gradients are views into the communication buckets, which saves a copy of them. The buckets' final layout is
        settled here, not in the first step, so that a training that is resumed adds up gradients in the same order.
        """
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model.to(self.device), device_ids=device_ids, gradient_as_bucket_view=True)
        settle_buckets(wrapped)
        return wrapped

    def shard(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        **loader_options: Any,
    ) -> Shard:
        """This rank's batches of a dataset: every sample on exactly one rank in each epoch.

        A TensorDataset or `ResidentSet` for which there is room is kept on the device, and its batches are made there.
        Others, and those with loader options, go through torch's DataLoader: its batches are the CPU's.

        Args:
            dataset: with a length and items by index.
            batch_size: samples per rank and step.
            shuffle_seed: reshuffles each epoch (`Shard.set_epoch`); None keeps the dataset's order.
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
        batches = GlobalBatches(size, batch_size, rank=self.rank, world_size=self.world_size, seed=shuffle_seed)
        if not loader_options and (resident := place(dataset, self.device)):
            return Shard(batches, Gathered(resident, batches))
        cpus = devices.cpus(self.topology)
        return Shard(batches, Loader(dataset, batches, device=self.device, cpus=cpus, **loader_options))

    def seed_rank(self, seed: int) -> None:
        """Give this rank random numbers of its own (torch's, Python's, NumPy's); call it after building the model."""
        seed_all(stream_seed(seed, self.rank))


@contextmanager
def distributed(
    *,
    cuda: bool = True,
    rendezvous_timeout_s: float = rendezvous.DEFAULT_TIMEOUT_S,
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S,
) -> Iterator[World]:
    """Join the world of ranks that the environment describes, and leave it in the end.

    An exception of the body is printed at once, with rank and host, and goes on; the ranks that it brings down point
    to it.

    Args:
        cuda: use GPUs where there are some.
        rendezvous_timeout_s: seconds to wait for all ranks.
        collective_timeout_s: seconds that a rank may let the others wait later on; then they name it and end.

    Raises:
        TopologyError: the environment contradicts itself.
        RendezvousError: not all ranks came.
        DeviceError: GPUs don't match the ranks.
    """
    reporter = FailureReporter()
    reporter.install()
    reporter.topology = topology = Topology.from_environ(os.environ)
    _set_up_logging(topology)
    device = _set_up_device(topology, cuda)
    store = rendezvous.meet(topology, timeout_s=rendezvous_timeout_s)
    reporter.store, reporter.collective_timeout_s = store, collective_timeout_s
    _set_up_interface(topology)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("process_group", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    reporter.install()  # again: init_process_group has put a hook of its own before it
    world = World(topology=topology, device=device)
    try:
        yield world
        world.barrier()  # rank 0 serves the store: it must not leave while others still ask it
        time.sleep(_GLOO_SETTLES_S)
    except Stopped:  # by all ranks together, each with its affairs in order
        reporter.store = None
        time.sleep(_GLOO_SETTLES_S)
        _leave(failed=False)
        raise
    except BaseException as error:
        if not _is_exit_without_error(error):
            reporter.report(error)
        _leave(failed=True)
        raise
    reporter.store = None  # from here on, each rank's failures are its own
    _leave(failed=False)


def _is_exit_without_error(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and not error.code


def _leave(*, failed: bool) -> None:
    if failed and dist.get_backend() != "gloo":
        # Ending NCCL the orderly way waits for collectives that a failed rank will never join.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _set_up_interface(topology: Topology) -> None:
    if topology.world_size == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = interface_towards(topology.master_addr)
    if interface == "lo" and topology.num_nodes != 1:
        # Rank 0's own name may mean 127.0.1.1 there (Debian): the way to another node is the right one.
        interface = next(filter(None, map(interface_towards, topology.nodes[1:])), None)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _set_up_logging(topology: Topology) -> None:
    if log.handlers:
        return
    handler = logging.StreamHandler()
    prefix = f"[rank {topology.rank} {socket.gethostname()}]"
    handler.setFormatter(logging.Formatter(f"{prefix} %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def _set_up_device(topology: Topology, cuda: bool) -> torch.device:
    visible = torch.cuda.device_count() if cuda else 0
    if cuda and visible == 0 and topology.gpus_on_node and topology.local_rank == 0 and topology.node_rank in (0, None):
        log.warning(
            "Slurm gave %d GPUs on this node, but torch %s sees none: computing on the CPU.",
            topology.gpus_on_node,
            torch.__version__,
        )
    device = torch.device(devices.choose(topology, visible, os.environ))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed(os.environ)
        if (threads := devices.cpu_threads(topology, os.environ)) is not None:
            torch.set_num_threads(threads)
    return device
