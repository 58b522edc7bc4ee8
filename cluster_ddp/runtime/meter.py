"""Sums over samples that outlive a stop in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from cluster_ddp.runtime.world import World


class PerRank(Protocol):
    """Something that each rank has for itself and a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's, of tensors and plain values."""

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take on this rank's; of another number of ranks, those of none or several."""


class Meter:
    """A running sum and a count on this rank; `mean` is over all ranks. A checkpoint keeps every rank's.

    Args:
        world: of the ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.total, self.count = torch.zeros((), device=world.device), 0

    def add(self, total: torch.Tensor, count: int) -> None:
        """Add a batch: the sum over it (one element, any dtype and device) and its number of samples."""
        self.total, self.count = self.total + total.detach(), self.count + count

    def mean(self) -> float | None:
        """The mean over all ranks since the last reset; None of nothing. A collective; it waits for the device."""
        total, count = self.world.sum(self.total, self.count)
        return total / count if count else None

    def reset(self) -> None:
        """Begin again."""
        self.total, self.count = torch.zeros((), device=self.world.device), 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's sum and count."""
        return {"total": self.total, "count": self.count}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from this rank's state; where fewer ranks resume than stopped, from those of several."""
        self.reset()
        if states:
            self.total = torch.stack([state["total"] for state in states]).sum().to(self.world.device)
            self.count = sum(state["count"] for state in states)
