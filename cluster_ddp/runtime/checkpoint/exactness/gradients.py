"""Gradients that no optimizer has used, or that one has used together with those of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cluster_ddp.runtime import non_finite
from cluster_ddp.runtime.checkpoint.exactness import optimizer_state
from cluster_ddp.runtime.model.dtensor_pieces import is_sharded, local_part

LOOKED_AT = 3
"""Steps of an optimizer: whoever forgets zero_grad has forgotten it there."""


class Gradients:
    """Whether a backward pass has come since the last step of any of these optimizers.

    It looks at the gradient of one parameter of each, after each of their steps. Without an optimizer it finds nothing.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._all = [one for optimizer in optimizers for one in optimizer_state.parameters(optimizer)]
        smallest = {optimizer: _smallest(optimizer) for optimizer in optimizers}
        self._watched = [one for one in smallest.values() if one is not None]
        self._used: list[Any] = [_version(one) for one in self._watched]
        used, watched = self._used, self._watched  # not this object: the optimizers may outlive it

        def note(*_: object) -> None:
            used[:] = map(_version, watched)

        for optimizer in optimizers:
            optimizer.register_step_post_hook(note)
        self._sums = [_GradientSum(optimizer, one) for optimizer, one in smallest.items() if one is not None]

    @property
    def are_added_up(self) -> bool:
        """Whether an optimizer has made a step with the sum of its gradient and that of the step before."""
        return any(one.is_used for one in self._sums)

    def are_unused(self) -> bool:
        """Whether there are such gradients, all of them finite, and not all zeros: a bad step may have been skipped."""
        found = [_version(one) for one in self._watched]
        new = [now[0] for now, used in zip(found, self._used) if now[0] is not used[0] or now[1] != used[1]]
        if not any(bool(local_part(one).any()) for one in new if one is not None):
            return False
        return bool(non_finite.are_finite([one.grad for one in self._all if one.grad is not None]))


class _GradientSum:
    """Whether an optimizer has made a step with its gradient added to that of the step before, in its first steps.

    It looks at one gradient before each backward pass reaches it. That waits for a GPU.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self.is_used = False
        self._parameter = parameter
        self._steps = 0
        self._passes = 0  # since the last step
        self._is_sum = False
        self._last = _version(parameter)
        if is_sharded(parameter):  # FSDP2 calls no other hook
            self._hook = parameter.register_post_accumulate_grad_hook(self._after_pass)
        else:
            self._hook = parameter.register_hook(self._before_pass)
        optimizer.register_step_post_hook(self._note_step)

    def _before_pass(self, _: torch.Tensor) -> None:
        gradient = self._parameter.grad
        if gradient is not None and gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph can't wait
        self._note_pass(has_older=gradient is not None and bool(gradient.any()))

    def _after_pass(self, parameter: torch.Tensor) -> None:
        """FSDP2 adds to the local part: the count of changes, which a zero_grad in place raises, stays the same."""
        before, self._last = self._last, _version(parameter)
        self._note_pass(has_older=self._last[0] is before[0] and self._last[1] == before[1])

    def _note_pass(self, *, has_older: bool) -> None:
        self._is_sum = has_older and (self._is_sum or self._passes == 0 < self._steps)
        self._passes += 1

    def _note_step(self, *_: object) -> None:
        self.is_used |= self._is_sum
        self._is_sum = False
        self._passes = 0
        self._steps += 1
        self._last = _version(self._parameter)
        if self._steps == LOOKED_AT:
            self._hook.remove()


def _smallest(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The smallest parameter that it trains now: its gradient is kept until the next step."""
    parameters = [one for one in optimizer_state.parameters(optimizer) if one.requires_grad]
    return min(parameters, key=torch.Tensor.numel, default=None)


def _version(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A parameter's gradient, and how often it has been changed."""
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version
