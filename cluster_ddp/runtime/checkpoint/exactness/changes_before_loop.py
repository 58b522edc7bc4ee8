"""What a script changes after its Checkpointer, before the loop, such as weights that it loads there.

A resume runs that line again: it replaces what the checkpoint had.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.checkpoint.exactness import state_digest
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")

# Other parts may have a state that changes by itself, such as a clock.
_COMPARED = torch.nn.Module, torch.optim.Optimizer, LRScheduler
_SETTINGS = "settings"


class ChangesBeforeLoop:
    """Compares the parts of a training as its loop begins with those that it was made or resumed with."""

    def __init__(self, world: World, parts: Mapping[str, Any]) -> None:
        self._world = world
        self._parts = {name: part for name, part in parts.items() if isinstance(part, _COMPARED)}
        self._before = self._digests()

    def check(self, asked: str) -> None:
        """Compare them. Other settings of an optimizer or scheduler, such as a learning rate, are only logged.

        Raises:
            SpecError: a part of this rank has other weights, or an optimizer another state.
        """
        now = self._digests()
        for name, kind in self._before:
            if now[name, kind] == self._before[name, kind]:
                continue
            if kind != _SETTINGS:
                found = (
                    f"{name!r} has other {kind} than when the Checkpointer was made: each resume would replace them."
                )
                raise SpecError(asked, found, "load them before: the Checkpointer comes last, and loads its own")
            if self._world.is_main:
                words = "%r has other settings than when the Checkpointer was made. A resume sets them again: %s."
                log.warning(words, name, "that is exact if they are the same at each start, or follow checkpoint.steps")

    def _digests(self) -> dict[tuple[str, str], str]:
        states = {(name, kind): state for name, part in self._parts.items() for kind, state in _by_kind(part).items()}
        return state_digest.of_rank(self._world, states)


def _by_kind(part: Any) -> dict[str, Any]:
    """The state of a part, without buffers: a module counts its batches in them."""
    if isinstance(part, torch.nn.Module):
        return {"weights": state_digest.weights(part)}
    state = part.state_dict()
    if isinstance(part, torch.optim.Optimizer):
        return {"moments": state["state"], _SETTINGS: state["param_groups"]}
    return {_SETTINGS: state}
