"""What all ranks do together: sums, maxima, waiting for each other; and sums that survive a stop (`Meter`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
import torch.distributed as dist

from cluster_ddp.agent.channel import Key
from cluster_ddp.errors import DataError
from cluster_ddp.runtime import object_collectives, process_group
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.slurm.topology import Topology

T = TypeVar("T")

DEFAULT_COLLECTIVE_TIMEOUT_S = 600.0
_Operation = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """All ranks of the run, seen from one of them. Every rank must make the same calls in the same order."""

    topology: Topology
    """This rank's place."""
    device: torch.device
    """The device of this rank; of several, the first one."""
    more_devices: tuple[torch.device, ...] = ()
    """The other devices of this rank (`gpus_per_task`)."""
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S
    """Seconds to wait for the other ranks in a collective."""
    peer_failed: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether another rank is known to have failed."""
    key: Key = field(default_factory=lambda: Key(os.urandom(32)), repr=False)
    """The key that only the ranks of this run have."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this rank, for a model over several; see `gpus_per_task` of `JobSpec`."""
        return self.device, *self.more_devices

    @property
    def rank(self) -> int:
        """0 … world_size - 1."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node, from 0."""
        return self.topology.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all ranks are here and their devices have finished their work. A collective.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
            RuntimeError: gloo: a rank did not come in time or is gone.
        """
        self.synchronize()
        process_group.barrier()
        last_progress.note_progress()

    def synchronize(self) -> None:
        """Wait until this rank's GPUs have finished the work of their current streams; on a CPU return at once.

        Use it before calls that would block until then (`tensor.item()`, `tensor.cpu()`). It lets signal handlers run,
        and raises an error if other ranks have failed or hang.

        Raises:
            DeviceTimeoutError: the device was not done after `collective_timeout_s` seconds; a RuntimeError.
            PeerFailedError: another rank failed; a RuntimeError.
        """
        for device in self.devices:
            interruptible_wait.for_device(device, timeout_s=self.collective_timeout_s, peer_failed=self.peer_failed)

    @overload
    def sum(self, value: float | torch.Tensor, /) -> float: ...

    @overload
    def sum(
        self, value: float | torch.Tensor, second: float | torch.Tensor, /, *more: float | torch.Tensor
    ) -> list[float]: ...

    def sum(self, *values: float | torch.Tensor) -> float | list[float]:
        """Add up values over all ranks. A collective: all ranks must call it, with as many values.

        Args:
            values: numbers or one-element tensors of this rank.

        Returns:
            The sum of one value; of several, a list with the sum of each. Computed in float64; the same on every rank.

        Raises:
            DeviceTimeoutError, PeerFailedError: as `synchronize`.
        """
        sums = self._reduced(values, "sum")
        return sums[0] if len(values) == 1 else sums

    def max(self, value: float | torch.Tensor) -> float:
        """Return the largest of all ranks' values: numbers or one-element tensors. A collective; see `sum`."""
        return self._reduced([value], "max")[0]

    def min(self, value: float | torch.Tensor) -> float:
        """Return the smallest of all ranks' values: numbers or one-element tensors. A collective; see `sum`."""
        return self._reduced([value], "min")[0]

    def all_reduce(self, tensor: torch.Tensor, operation: _Operation = "sum") -> torch.Tensor:
        """Return the sum, maximum or minimum of all ranks' tensors, element by element. A collective.

        Args:
            tensor: of the same shape and dtype on every rank, on any device; it is not changed.
            operation: "sum", "max" or "min".

        Returns:
            A tensor of that shape and dtype on this rank's device, the same on every rank.
        """
        self.synchronize()  # copying a tensor to the device would block until then
        process_group.check()
        result = tensor.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(result, op=_OPERATIONS[operation])
        last_progress.note_progress()
        return result

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

    @contextmanager
    def main_first(self, *, of_node: bool = False) -> Iterator[None]:
        """Run the body on rank 0 first, then on all other ranks: to download or prepare files once. A collective.

        Args:
            of_node: on the first rank of each node, for files on a node's own disk.
        """
        is_first = self.local_rank == 0 if of_node else self.is_main
        if not is_first:
            self.barrier()
        yield
        if is_first:
            self.barrier()

    def _reduced(self, values: Sequence[float | torch.Tensor], operation: _Operation) -> list[float]:
        self.synchronize()  # copying a number to the device would block until then
        mine = [torch.as_tensor(value, dtype=torch.float64).reshape(()).to(self.device) for value in values]
        total = self.all_reduce(torch.stack(mine), operation)
        self.synchronize()
        last_progress.note_progress()  # now it has ended on a GPU, too
        return list(map(float, total.tolist()))


class PerRank(Protocol):
    """A state that differs between ranks and is part of each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, of tensors and plain values."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load this rank's saved state; if another number of ranks saved, the states of zero, one or several ranks."""


class Meter:
    """A running sum and a count on this rank; `mean` is over all ranks. Checkpoints keep those of every rank."""

    def __init__(self, world: Collectives) -> None:
        self.world = world
        self.total, self.count = torch.zeros((), device=world.device), 0

    def add(self, total: torch.Tensor | float, count: int) -> None:
        """Add a batch.

        Args:
            total: the sum over it: a number, or one element, real, on a device of this rank.
            count: its number of samples.
        """
        total = torch.as_tensor(total).detach().to(self.total.device)
        self.total, self.count = self.total + total, self.count + count

    def mean(self) -> float | None:
        """Return the mean over all ranks since the last reset; None without samples. A collective."""
        total, count = self.world.sum(self.total, self.count)
        return total / count if count else None

    def reset(self) -> None:
        """Set sum and count to 0."""
        self.total, self.count = torch.zeros((), device=self.world.device), 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sum and count."""
        return {"total": self.total, "count": self.count}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the total of some ranks' states; none means 0. See `PerRank`."""
        self.reset()
        if states:
            self.total = torch.stack([state["total"] for state in states]).sum().to(self.world.device)
            self.count = sum(state["count"] for state in states)
