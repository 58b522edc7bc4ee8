"""Stop before a non-finite loss (NaN or Inf) ruins the weights, and never save ruined ones over good ones."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cluster_ddp.errors import NonFiniteError
from cluster_ddp.runtime.checkpoint.host_copy import tensors_in
from cluster_ddp.runtime.model.dtensor_pieces import is_sharded, local_part
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")

OnNan = Literal["stop", "continue"]


class FiniteCheck:
    """Checks each step's gradients, after DDP has averaged them: then one rank's NaN is in the gradients of all ranks.

    So all ranks get the same result without an extra collective. After a bad step they exchange their losses. Under
    FSDP2 a NaN may be in one rank's shard only: a small all-reduce tells the others, in `may_update` or in `look`.

    On a CPU, and with on_nan="continue", `may_update` checks each step before its update. On a GPU with on_nan="stop"
    that would wait for the device in each step: the results stay there until `look`. Call `look` where you wait for the
    device anyway, and before each save. The updates after the first bad step are then in no checkpoint.

    With a GradScaler, gradients overflow now and then, and it skips those updates itself. Then only a non-finite loss
    counts.

    Args:
        world: all ranks.
        model: the model, from `World.wrap`.
        on_nan: "stop": raise an error; "continue": skip the update of that step.
        last_good: returns the newest undamaged checkpoint (on rank 0), for the error; None if there is none.
        scaler: from `World.grad_scaler`. Call `may_update` before its `step`.
    """

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        *,
        on_nan: OnNan,
        last_good: Callable[[], Path | None],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._world, self._on_nan, self._last_good = world, on_nan, last_good
        self._is_scaled = scaler is not None and scaler.is_enabled()
        self._parameters = list(model.parameters())
        self._at_once = world.device.type == "cpu" or on_nan == "continue"
        self._step_checks: list[_StepCheck] = []  # of the steps since the last look

    def may_update(self, loss: torch.Tensor, *, step: int, epoch: int) -> bool:
        """Return whether the optimizer may make its step. Call it on every rank after backward().

        On a GPU with on_nan="stop" it is always True: `look` checks later.

        Args:
            loss: this rank's loss, one element on any device.
            step: number of the step in its epoch, for the message.
            epoch: number of the epoch, for the message.

        Raises:
            NonFiniteError: a gradient is non-finite (NaN or Inf), and `on_nan` is "stop". It names the ranks with a
                non-finite loss.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        asked = f"Training, step {step} of epoch {epoch}:"
        self._step_checks.append(_StepCheck(are_finite(gradients), loss.detach(), asked))
        return self.look() if self._at_once else True

    def look(self) -> bool:
        """Return whether all steps since the last call were finite. Call it on every rank. Waits for a GPU.

        Raises:
            NonFiniteError: one was not, and `on_nan` is "stop".
        """
        checks, self._step_checks = self._step_checks, []
        self._world.synchronize()
        if not checks:
            return True
        finite = torch.stack([check.is_finite for check in checks])
        if any(map(is_sharded, self._parameters)):  # else all ranks have the same
            finite = self._world.all_reduce(finite.to(torch.uint8), "min")
            self._world.synchronize()
        if bool(finite.all()):
            return True
        return not any(self._is_bad(check) for check, is_finite in zip(checks, finite.tolist()) if not is_finite)

    def _is_bad(self, first: _StepCheck) -> bool:
        """Report a step with non-finite gradients, unless a scaler has made them so. A collective."""
        losses = self._world.gather((float(first.loss), node_name(os.environ)))
        wrong = [
            f"rank {rank} on {host}: loss {loss}" for rank, (loss, host) in enumerate(losses) if not math.isfinite(loss)
        ]
        if self._is_scaled and not wrong:
            return False
        found = "; ".join(wrong) or "the loss is finite on all ranks, but gradients are not"
        if self._on_nan == "continue":
            if self._world.is_main:
                log.warning("%s %s. The update of this step is skipped.", first.asked, found)
            return True
        last_good = self._world.broadcast(self._last_good())
        hint = (
            "check that rank's data; or take a lower learning rate in a new run directory; "
            'or skip such updates: --on-nan continue, in a script FiniteCheck(on_nan="continue")'
        )
        raise not_saved(first.asked, found, last_good, hint)


class FiniteState:
    """Finds NaN and Inf in copies of a training's state: in the parameters of models and the state of optimizers.

    Not in buffers: a causal mask holds -inf. Nor in a parameter that began so, and the optimizer's state of it. Make it
    of all parts, before a checkpoint is loaded: it waits for a GPU, once.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parameters = {
            name: [key for key, _ in part.named_parameters(remove_duplicate=False)]
            for name, part in parts.items()
            if isinstance(part, torch.nn.Module)
        }
        optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._optimizers = list(optimizers)
        self._began_so: set[str] = set()
        began = {name: parts[name].state_dict() for name in [*self._parameters, *optimizers]}
        given = {
            _of_optimizer(name, number): [parameter]
            for name, optimizer in optimizers.items()
            for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"])
        }
        self._began_so = {*self.non_finite(began), *(name for name, one in given.items() if not _is_finite(one))}

    def non_finite(self, states: Mapping[str, Any]) -> list[str]:
        """Return the names of the entries with NaN or Inf that began without, in the `state_dict()` of each part.

        Of copies of them in the host's memory, no device is waited for.
        """
        return [
            name for name, tensors in self._entries(states) if name not in self._began_so and not _is_finite(tensors)
        ]

    def _entries(self, states: Mapping[str, Any]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for name, keys in self._parameters.items():
            yield from ((f"{name} {key}", [states[name][key]]) for key in keys if key in states[name])
        for name in self._optimizers:
            for number, state in states[name].get("state", {}).items():
                yield _of_optimizer(name, number), [tensor for _, tensor in tensors_in(state, "")]


def not_saved(asked: str, found: str, last_good: Path | None, hint: str) -> NonFiniteError:
    """Return the error for a non-finite state, which is not saved."""
    return NonFiniteError(
        asked, f"{found}. This state is not saved; last good checkpoint: {last_good or 'none yet'}.", hint
    )


def _of_optimizer(name: str, number: object) -> str:
    return f"{name} state of parameter {number}"


def _is_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether all elements of the floating tensors are finite. Those of one byte (float8) are not looked at."""
    floating = [
        one.detach()
        for one in tensors
        if (one.is_floating_point() or one.is_complex()) and one.layout == torch.strided and one.itemsize > 1
    ]
    return bool(are_finite(floating))


def are_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether all elements are finite: bool, one element, on the tensors' device. Of a DTensor, this rank's shard."""
    tensors = [local_part(tensor) for tensor in tensors]
    tensors = [tensor for tensor in tensors if tensor.numel()]  # an empty one has no norm
    if any(tensor.device.type != "cpu" or tensor.is_complex() for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors, norm_type=math.inf).isfinite()
    # On a CPU this is fifteen times as fast. Both pass NaN on. float64 lets different dtypes be stacked.
    extremes = [extreme.double() for tensor in tensors for extreme in torch.aminmax(tensor)]
    return torch.stack([torch.zeros((), dtype=torch.float64), *extremes]).isfinite().all()


@dataclass(frozen=True, slots=True)
class _StepCheck:
    """The result of one step; its tensors are on the device."""

    is_finite: torch.Tensor
    loss: torch.Tensor
    asked: str
