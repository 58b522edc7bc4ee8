"""How long a step waits for DDP's all-reduces: the part that the backward pass does not hide.

After a backward pass autograd runs the callbacks that were queued in it, in their order. In one of them DDP waits for
its all-reduces (reducer.cpp, finalize_backward). Ours is queued before it, and queues another one that runs after it.
On GPUs both record an event on the stream of the backward pass. These are read later: nothing ever waits for them.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# Of fast steps not all are measured, so that it costs next to nothing.
_EVERY_S = 0.1


class ExposedCommunication:
    """Measures the backward passes of a model, from the first one after this on, until `close`.

    Args:
        model: its first parameter that DDP adds up gets a hook.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        first = reduced(model)[0]
        # The hook must not keep the model: DDP's C++ code has the parameters, so no garbage collection would find that.
        self._model, self._device = weakref.ref(model), first.device
        self._pending: list[tuple[Any, Any]] = []
        self._measured_at_s = 0.0
        self.reset()
        # It runs before DDP's own hook of this parameter, and so before DDP queues its callback.
        self._hook = first.register_post_accumulate_grad_hook(self._saw_backward)

    def of_a_step(self, steps: int) -> float | None:
        """Return the mean seconds of a step since `reset`; None if unknown: a CUDA graph's replay runs no hooks.

        Args:
            steps: number of steps since then, 1 or more.
        """
        while self._pending and self._is_done(self._pending[0][1]):
            self._seconds += self._between(*self._pending.pop(0))
            self._samples += 1
        if not self._samples or self._backwards < steps:
            return None
        return self._seconds / self._samples * self._reduced / steps

    def reset(self) -> None:
        """Forget what was measured."""
        self._seconds, self._samples = 0.0, 0
        self._backwards = self._reduced = 0  # how many there were; and those that added up gradients over the ranks

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _saw_backward(self, _: torch.Tensor) -> None:
        if self._is_capturing():
            return
        self._backwards += 1
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        self._reduced += 1
        now_s = time.monotonic()
        if now_s - self._measured_at_s >= _EVERY_S:
            self._measured_at_s = now_s
            _after_backward(self._computed)

    def _computed(self) -> None:
        start = self._mark()
        _after_backward(lambda: self._pending.append((start, self._mark())))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _is_done(self, mark: Any) -> bool:
        return self._device.type != "cuda" or mark.query()

    def _between(self, start: Any, end: Any) -> float:
        return float(end - start if self._device.type != "cuda" else start.elapsed_time(end) / 1000)

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reduced(model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP adds up over the ranks: not those that are frozen or left to others."""
    return [
        parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]


def _after_backward(function: Any) -> None:
    """Call a function after the backward pass that runs now. It has no public name, but torch's FSDP uses it, too."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
