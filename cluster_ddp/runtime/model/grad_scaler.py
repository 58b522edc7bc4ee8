"""torch's GradScaler, which also says when scaled gradients are clipped."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from cluster_ddp.errors import SpecError

log = logging.getLogger("cluster_ddp")


class GradScaler(torch.amp.GradScaler):
    """From `World.grad_scaler`. Says once if it unscales or steps an optimizer whose gradients were clipped before."""

    def __init__(self, device: str, *, enabled: bool) -> None:
        """Take torch's defaults for all that is not named here."""
        super().__init__(device, enabled=enabled)
        self._has_told = False
        self._has_scaled = False
        self._unscaled: set[int] = set()
        self._clipped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        _of_this_process.add(self)

    def scale(self, outputs: Any) -> Any:
        """As torch's."""
        self._has_scaled = self.is_enabled()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's."""
        self._tell_of_clipped(optimizer)
        super().unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's."""
        self._tell_of_clipped(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's."""
        super().update(new_scale)
        self._has_scaled = False
        self._unscaled.clear()
        self._clipped.clear()

    def note_clipped(self, model: torch.nn.Module) -> None:
        """Note that a model's gradients are clipped: wrong if this scaler has scaled its loss."""
        if self._has_scaled:
            self._clipped.add(model)

    def _tell_of_clipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._has_told or not self._clipped or id(optimizer) in self._unscaled:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        clipped = {id(parameter) for model in self._clipped for parameter in model.parameters()}
        if own & clipped:
            self._has_told = True
            found = (
                f"they are {self.get_scale():g} times as large as they should be: the GradScaler has scaled the loss."
            )
            error = SpecError("Clipping gradients:", found, "call scaler.unscale_(optimizer) before")
            log.error("%s\nTraining continues.", error)


_of_this_process: weakref.WeakSet[GradScaler] = weakref.WeakSet()


def note_clipped(model: torch.nn.Module) -> None:
    """Let each GradScaler of this process know that a model's gradients are about to be clipped."""
    for scaler in _of_this_process:
        scaler.note_clipped(model)
