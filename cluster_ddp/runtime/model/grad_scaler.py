"""torch's GradScaler, which also says when scaled gradients are clipped."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from cluster_ddp.errors import SpecError

log = logging.getLogger("cluster_ddp")


class GradScaler(torch.amp.GradScaler):
    """From `World.grad_scaler`. Knows whether it has scaled a loss since its last `unscale_` or `update`."""

    def __init__(self, device: str, *, enabled: bool) -> None:
        """Take torch's defaults for all that is not named here."""
        super().__init__(device, enabled=enabled)
        self.has_scaled = False
        self.has_told = False
        _of_this_process.add(self)

    def scale(self, outputs: Any) -> Any:
        """As torch's."""
        self.has_scaled = self.is_enabled()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's."""
        super().unscale_(optimizer)
        self.has_scaled = False

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's."""
        super().update(new_scale)
        self.has_scaled = False


_of_this_process: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def tell_of_clipping() -> None:
    """Gradients are about to be clipped: say once of each scaler if they are scaled."""
    for scaler in _of_this_process:
        if scaler.has_scaled and not scaler.has_told:
            scaler.has_told = True
            found = (
                f"they are {scaler.get_scale():g} times as large as they should be: the GradScaler has scaled the loss."
            )
            error = SpecError("Clipping gradients:", found, "call scaler.unscale_(optimizer) before")
            log.error("%s\nTraining continues.", error)
