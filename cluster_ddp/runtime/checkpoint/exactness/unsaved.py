"""What a training has at a save and no checkpoint has: that is said once, since a resume begins without it.

The state of a communication hook of DDP, such as PowerSGD's errors; and gradients that no optimizer has used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime import non_finite
from cluster_ddp.runtime.model import ddp
from cluster_ddp.runtime.model.dtensor_pieces import local_part

log = logging.getLogger("cluster_ddp")

_OF_HOOK = "give the hook a state that is also in meters: an object with state_dict() and load_state_dicts(states)"
_OF_GRADIENTS = (
    "call checkpoint.step() only after the optimizer's step; "
    "`with world.accumulate(model, shard, every=4) as is_last:` says after which batch that is"
)


class Unsaved:
    """Finds that in the parts of a training. Make it before the first step."""

    def __init__(self, parts: Mapping[str, Any], meters: Iterable[object]) -> None:
        self._parts, self._saved = dict(parts), [*parts.values(), *meters]
        self._gradients = _Gradients([one for one in parts.values() if isinstance(one, torch.optim.Optimizer)])
        self._told: set[str] = set()

    def tell(self, step: int) -> None:
        """Say what this step's checkpoint lacks, each once. Call it on rank 0, when its device has done its work."""
        for name, part in self._parts.items():
            for state in ddp.hook_states(part):
                if not any(state is one for one in self._saved):
                    found = f"{name!r} has a communication hook with a state, {type(state).__name__}."
                    self._say(step, found, _OF_HOOK)
        if self._gradients.are_unused():
            self._say(step, "there are gradients that no optimizer has used.", _OF_GRADIENTS)

    def _say(self, step: int, found: str, hint: str) -> None:
        if found not in self._told:
            self._told.add(found)
            lost = "No checkpoint has that, and a resume begins without it: it will not be exact."
            log.error("%s\nTraining continues.", CheckpointError(f"Saving step {step}:", f"{found} {lost}", hint))


class _Gradients:
    """Whether a backward pass has come since the last step of any of these optimizers.

    It looks at the gradient of one parameter of each, after each of their steps. Without an optimizer it finds nothing.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        trained = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
        self._all = [one for of_one in trained for one in of_one]
        # The smallest one: its gradient is kept until the next step.
        self._watched = [min(of_one, key=torch.Tensor.numel) for of_one in trained if of_one]
        self._used: list[Any] = [_version(one) for one in self._watched]
        used, watched = self._used, self._watched  # not this object: the optimizers may outlive it

        def note(*_: object) -> None:
            used[:] = map(_version, watched)

        for optimizer in optimizers:
            optimizer.register_step_post_hook(note)

    def are_unused(self) -> bool:
        """Whether there are such gradients, all of them finite, and not all zeros: a bad step may have been skipped."""
        found = [_version(one) for one in self._watched]
        new = [now[0] for now, used in zip(found, self._used) if now[0] is not used[0] or now[1] != used[1]]
        if not any(bool(local_part(one).any()) for one in new if one is not None):
            return False
        return bool(non_finite.are_finite([one.grad for one in self._all if one.grad is not None]))


def _version(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A parameter's gradient, and how often it has been changed."""
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version
