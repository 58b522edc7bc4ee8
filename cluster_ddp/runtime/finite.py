"""Stop before a non-finite loss (NaN or Inf) ruins the weights, or at least before they are saved."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cluster_ddp.errors import NonFiniteError
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

OnNan = Literal["stop", "continue"]


class FiniteCheck:
    """Looks at each step's gradients, after DDP has averaged them: one rank's NaN is in all ranks' then.

    So all ranks see the same, without a collective of its own; where something is wrong, they exchange their losses.

    On a CPU each step is judged before its update. A GPU would have to be waited for: there the verdicts stay on the
    device until `look`, which is to be called where it is waited for anyway, and before each save. Updates made since
    the first bad step are lost with the training then; no checkpoint has them. To leave updates out, each step is
    judged at once.

    Args:
        world: of the ranks.
        model: whose gradients to look at.
        on_nan: "stop", or "continue": leave out the update of that step.
        last_good: the newest whole checkpoint, for the error.
    """

    def __init__(
        self, world: World, model: torch.nn.Module, *, on_nan: OnNan, last_good: Callable[[], Path | None]
    ) -> None:
        self._world, self._on_nan, self._last_good = world, on_nan, last_good
        self._parameters = list(model.parameters())
        self._at_once = world.device.type == "cpu" or on_nan == "continue"
        self._verdicts: list[_Verdict] = []  # of the steps since the last look

    def may_update(self, loss: torch.Tensor, *, step: int, epoch: int) -> bool:
        """Whether the optimizer may make its step, as far as is known; call it after backward().

        Args:
            loss: this rank's, one element.
            step: of the epoch, for the message.
            epoch: for the message.

        Raises:
            NonFiniteError: some gradient is non-finite (NaN or Inf); with the rank that it comes from.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        asked = f"Training, step {step} of epoch {epoch}:"
        self._verdicts.append(_Verdict(_are_finite(gradients), loss.detach(), asked))
        return self.look() if self._at_once else True

    def look(self) -> bool:
        """Whether all steps since the last look were finite. On a GPU it waits for the device.

        Raises:
            NonFiniteError: some step was not, and `on_nan` is "stop".
        """
        verdicts, self._verdicts = self._verdicts, []
        self._world.synchronize()
        if not verdicts or bool(torch.stack([verdict.is_finite for verdict in verdicts]).all()):
            return True
        self._report(next(verdict for verdict in verdicts if not verdict.is_finite))
        return False

    def _report(self, first: _Verdict) -> None:
        losses = self._world.gather((float(first.loss), socket.gethostname()))
        wrong = [
            f"rank {rank} on {host}: loss {loss}" for rank, (loss, host) in enumerate(losses) if not math.isfinite(loss)
        ]
        found = "; ".join(wrong) or "the loss is finite on all ranks, but gradients are not"
        if self._on_nan == "continue":
            if self._world.is_main:
                log.warning("%s %s. This step's update is left out.", first.asked, found)
            return
        last = self._world.broadcast(str(self._last_good() or "none yet"))
        hint = (
            "look at that rank's data; or a lower --lr in a new run directory; or leave updates out: --on-nan continue"
        )
        raise NonFiniteError(first.asked, f"{found}. Nothing of it is saved; last good checkpoint: {last}.", hint)


def _are_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether all numbers are: bool, one element, on their device."""
    if any(tensor.device.type != "cpu" or tensor.is_complex() for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors, norm_type=math.inf).isfinite()
    # The same fifteen times as fast, on a CPU: NaN is passed on by both. In float64 as many dtypes can stand together.
    extremes = [extreme.double() for tensor in tensors if tensor.numel() for extreme in torch.aminmax(tensor)]
    return torch.stack([torch.zeros((), dtype=torch.float64), *extremes]).isfinite().all()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Of one step; its tensors are on the device."""

    is_finite: torch.Tensor
    loss: torch.Tensor
    asked: str
