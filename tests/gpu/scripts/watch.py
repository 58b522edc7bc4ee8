"""What a training tells while it runs: whether it waits for the GPU, what takes how long, a profile.

Each function takes its option of train.py's task, and the task.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

RESULT: dict[str, Any] = {}
"""What rank 0 writes to result.json."""

_QUIET_STEPS = 13  # DDP's own times, the graphs' warm-ups and captures are over then


def watch_syncs(is_on: bool, task: dict[str, Any]) -> None:
    """From the step `_QUIET_STEPS` of an epoch to its next log line, waiting for the GPU is an error."""
    import torch

    from cluster_ddp.mnist.training import Step
    from cluster_ddp.runtime.non_finite import FiniteCheck

    update, look, backward = Step.update, FiniteCheck.look, Step.backward
    state = {"step": 0}
    RESULT["watched_steps"] = 0

    def forbid(mode: str) -> None:
        if not task.get("rehearse"):
            torch.cuda.set_sync_debug_mode(mode)

    def quiet_backward(self: Step, images: Any, labels: Any, shard: Any) -> Any:
        state["step"] = shard.step
        RESULT["watched_steps"] += shard.step > _QUIET_STEPS
        return backward(self, images, labels, shard)

    def quiet_update(self: Step, epochs_done: float) -> None:
        update(self, epochs_done)
        if state["step"] == _QUIET_STEPS:
            forbid("error")
            RESULT.setdefault("notices", task.get("rehearse") or _notices())

    def loud_look(self: FiniteCheck) -> bool:
        forbid("default")
        return look(self)

    Step.backward, Step.update, FiniteCheck.look = quiet_backward, quiet_update, loud_look


def _notices() -> bool:
    """Whether the mode is at work."""
    import torch

    try:
        torch.ones((), device="cuda").item()
    except RuntimeError:
        return True
    return False


def note_times(is_on: bool, task: dict[str, Any]) -> None:
    from cluster_ddp.mnist.training import Training
    from cluster_ddp.runtime.checkpoint import checkpointer
    from cluster_ddp.runtime.checkpoint.saver import Saver

    owners: dict[str, Any] = {
        "step": checkpointer.Checkpointer,
        "save": Saver,
        "load_into": checkpointer,
        "train": Training,
    }
    RESULT["seconds"] = seconds = {name: [] for name in owners}
    for name, owner in owners.items():
        setattr(owner, name, _timed(getattr(owner, name), seconds[name]))


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*arguments: Any, **more: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return method(*arguments, **more)
        finally:
            seconds.append(time.perf_counter() - start_s)

    return timed


def save_profile(path: str, task: dict[str, Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    from cluster_ddp.mnist.training import Training

    train = Training.train

    def profiled(self: Training, epoch: int) -> None:
        if epoch != 2 or not self.world.is_main:
            return train(self, epoch)
        gpu = [] if task.get("rehearse") else [ProfilerActivity.CUDA]
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
            train(self, epoch)
            self.world.synchronize()
        profiler.export_chrome_trace(path)
        return None

    Training.train = profiled
