"""Sums over samples that survive a stop in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cluster_ddp.runtime.world import World


class PerRank(Protocol):
    """A state that differs between ranks and is part of each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, of tensors and plain values."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load this rank's saved state; if another number of ranks saved, the states of zero, one or several ranks."""


class Meter:
    """A running sum and a count on this rank; `mean` is over all ranks. Checkpoints keep those of every rank."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.total, self.count = torch.zeros((), device=world.device), 0

    def add(self, total: torch.Tensor, count: int) -> None:
        """Add a batch.

        Args:
            total: the sum over it: one element, real, on a device of this rank.
            count: its number of samples.
        """
        self.total, self.count = self.total + total.detach().to(self.total.device), self.count + count

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
