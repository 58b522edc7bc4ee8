"""Stop before a loss that is no number ruins the weights."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
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

    def may_update(self, loss: torch.Tensor, *, step: int, epoch: int) -> bool:
        """Whether the optimizer may make its step; call it after backward().

        Args:
            loss: this rank's, one element.
            step: of the epoch, for the message.
            epoch: for the message.

        Raises:
            NonFiniteError: some gradient is infinite or no number; with the rank that it comes from.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if bool(torch.nn.utils.get_total_norm(gradients, norm_type=math.inf).isfinite()):
            return True
        losses = self._world.gather((float(loss.detach()), socket.gethostname()))
        wrong = [
            f"rank {rank} on {host}: loss {loss}" for rank, (loss, host) in enumerate(losses) if not math.isfinite(loss)
        ]
        found = "; ".join(wrong) or "the loss is finite on all ranks, but gradients are not"
        asked = f"Training, step {step} of epoch {epoch}:"
        if self._on_nan == "continue":
            if self._world.is_main:
                log.warning("%s %s. This step's update is left out.", asked, found)
            return False
        last = self._world.gather(str(self._last_good() or "none yet"))[0]
        hint = "look at that rank's data; or a lower --lr in a new run folder; or leave updates out: --on-nan continue"
        raise NonFiniteError(asked, f"{found}. The optimizer made no step; last good checkpoint: {last}.", hint)
