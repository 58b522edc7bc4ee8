"""Where the time of a rank's steps goes: waiting for data, optimizer, communication, checkpoints, and the rest.

No step waits for its device. What the host can't see is left out: on GPUs the optimizer, whose kernels run in the
background, is part of the rest. Communication is the wait for DDP's all-reduces that the backward pass does not hide.
Where it is not measured, as under FSDP2 or in the replay of a CUDA graph, it is left out, and so is the comparison of
the ranks: each waits for the slowest.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.runtime.data.batch_iterator import BatchIterator

RECORD_EVERY_S = 10.0
# A record of less would say little.
_LEAST_S = 1.0
# Of fast steps not the communication of all is measured, so that it costs next to nothing.
_EVERY_S = 0.1


class StepTimes:
    """The times of the steps since the last record, on this rank.

    A step begins where the one before it ends, or the pass over the data begins. So an evaluation counts to no step.
    Of the parts that are trained, DDP models and optimizers are measured.
    """

    def __init__(self, shards: Sequence[BatchIterator], parts: Iterable[object], *, world_size: int) -> None:
        self._shards, self._world_size = shards, world_size
        parts = list(parts)
        inner = [getattr(part, "_orig_mod", part) for part in parts]  # of torch.compile's wrapper
        models = [part for part in inner if isinstance(part, DistributedDataParallel) and reduced(part)]
        self._communication = [ExposedCommunication(model) for model in models if world_size > 1]
        on_cpu = [part for part in parts if isinstance(part, torch.optim.Optimizer) and _is_on_cpu(part)]
        self._has_optimizer = bool(on_cpu)
        self._hooks = [hook for part in on_cpu for hook in self._hooked(part)]
        self._ended_s, self._optimizer_began_s = time.monotonic(), 0.0
        self._last, self._own_s = self._counts(), 0.0
        self._reset()

    @property
    def own_s(self) -> float:
        """Seconds of this rank's mean step without communication and checkpoints. 0 if unknown."""
        if self._steps and (communication_s := self._communication_s()) is not None:
            whole_s = (self._seconds - self._checkpoint_s) / self._steps
            # Not all steps are measured. Where nearly all is communication, that may be longer than the mean step.
            self._own_s = max(whole_s - communication_s, 0.01 * whole_s)
        return self._own_s

    def begin(self) -> None:
        """Note that a step's work is done, before saving and stopping are looked at."""
        now_s = time.monotonic()
        began_s = max([self._ended_s, *(shard.began_s for shard in self._shards)])
        waited_s = 0.0
        for shard, (waited_before_s, seen_before) in zip(self._shards, self._last):
            is_new_pass = shard.began_s > self._ended_s
            waited_s += shard.waited_s - (0.0 if is_new_pass else waited_before_s)
            self._samples += shard.seen_in_pass - (0 if is_new_pass else seen_before)
        self._steps += 1
        self._seconds += now_s - began_s
        self._data_s += min(waited_s, now_s - began_s)
        self._ended_s = now_s

    def end(self) -> None:
        """Note that the step has ended."""
        now_s = time.monotonic()
        self._checkpoint_s += now_s - self._ended_s
        self._seconds += now_s - self._ended_s
        self._ended_s, self._last = now_s, self._counts()

    def is_due(self) -> bool:
        """Return whether the steps since the last record took long enough for one."""
        return self._seconds >= RECORD_EVERY_S

    def record(self, of_ranks: Sequence[float]) -> dict[str, Any]:
        """Return the values of a "steps" record, and begin anew; empty if there is too little to say.

        `of_ranks` has `own_s` of each rank, 0 where it is unknown.
        """
        values = self._values(of_ranks) if self._steps and self._seconds >= _LEAST_S else {}
        if self._steps and self._communication_s() is None:
            self._own_s = 0.0  # what was known before is old
        self._reset()
        return values

    def close(self) -> None:
        """Remove the hooks of optimizers and models."""
        for hook in self._hooks:
            hook.remove()
        for one in self._communication:
            one.close()

    def _values(self, of_ranks: Sequence[float]) -> dict[str, Any]:
        steps = self._steps
        parts = {"data_s": self._data_s / steps} if self._shards else {}
        if self._has_optimizer:
            parts["optimizer_s"] = self._optimizer_s / steps
        parts["checkpoint_s"] = self._checkpoint_s / steps
        rest_s = max(0.0, self._seconds / steps - sum(parts.values()))
        if (communication_s := self._communication_s()) is not None:
            parts["communication_s"] = min(rest_s, communication_s)
        parts["compute_s"] = rest_s - parts.get("communication_s", 0.0)
        values: dict[str, Any] = {"steps": steps, "step_s": self._seconds / steps, **parts}
        if len(of_ranks) > 1 and all(of_ranks):
            values |= {"rank_s_min": min(of_ranks), "rank_s_max": max(of_ranks)}
        found: dict[str, Any] = {name: round(value, 7) for name, value in values.items()}
        if "rank_s_max" in found:
            found["slowest_rank"] = of_ranks.index(max(of_ranks))
        if self._samples:
            per_s = self._samples / self._seconds
            found |= {"samples_per_s": round(per_s, 1), "samples_per_s_per_rank": round(per_s / self._world_size, 2)}
        return found

    def _reset(self) -> None:
        self._steps = self._samples = 0
        self._seconds = self._data_s = self._optimizer_s = self._checkpoint_s = 0.0
        for one in self._communication:
            one.reset()

    def _counts(self) -> list[tuple[float, int]]:
        return [(shard.waited_s, shard.seen_in_pass) for shard in self._shards]

    def _communication_s(self) -> float | None:
        """Seconds of a step since the last record in which it waits for all-reduces; None if that is unknown."""
        found = [one.of_a_step(self._steps) for one in self._communication]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if known and len(known) == len(found) else None

    def _hooked(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        def begin(*_: object) -> None:
            self._optimizer_began_s = time.monotonic()

        def end(*_: object) -> None:
            self._optimizer_s += time.monotonic() - self._optimizer_began_s

        return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]


def _is_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    return all(one.device.type == "cpu" for group in optimizer.param_groups for one in group["params"])


class ExposedCommunication:
    """Measures the backward passes of a model, from the first one after this on, until `close`.

    After a backward pass autograd runs the callbacks that were queued in it, in their order. In one of them DDP waits
    for its all-reduces (reducer.cpp, finalize_backward). Ours is queued before it, and queues another one that runs
    after it. On GPUs both record an event on the stream of the backward pass. These are read later: nothing ever waits
    for them.
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
        """Return the mean seconds of the steps since `reset`; None if unknown: a replayed CUDA graph runs no hooks."""
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
