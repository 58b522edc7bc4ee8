"""What a test changes in a training, before it begins.

Each function takes its option of train.py's task, and the task.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import watch


def apply(task: dict[str, Any]) -> None:
    """Make all changes that a task asks for."""
    if task.get("rehearse"):
        _stand_in_for_graphs()
    for name, patch in PATCHES.items():
        if task.get(name) is not None:
            patch(task[name], task)
    _leave_result(Path(task["config"]["run_dir"]))


def _stand_in_for_graphs() -> None:
    from cluster_ddp.mnist.training import CudaGraphs

    CudaGraphs.__init__ = lambda self, world: None
    CudaGraphs.captured = lambda self, function, inputs: functools.partial(function, *inputs)


def _share_gpu(is_shared: bool, task: dict[str, Any]) -> None:
    from cluster_ddp.runtime.device import device

    if is_shared:
        device.choose = lambda topology, visible_gpus, env: "cuda:0" if visible_gpus else "cpu"


def _pretend_gpus(hidden: int, task: dict[str, Any]) -> None:
    """In a rehearsal the other ranks say that they compute on GPUs."""
    from cluster_ddp.runtime.rendezvous import store

    if task.get("rehearse"):
        meet = store.meet
        store.meet = lambda topology, device_type, *more, **options: meet(
            topology, "cpu" if topology.rank == hidden else "cuda", *more, **options
        )


def _set_capture(is_on: bool, task: dict[str, Any]) -> None:
    from cluster_ddp.mnist import training

    if not is_on:
        training._WARM_UPS = sys.maxsize


def _set_dropout(is_on: bool, task: dict[str, Any]) -> None:
    from torch.nn import Dropout

    from cluster_ddp.mnist.model import ByteDropout

    if not is_on:
        Dropout.forward = ByteDropout.forward = lambda self, x: x


def _cut(samples: int, task: dict[str, Any]) -> None:
    from cluster_ddp.mnist import data
    from cluster_ddp.runtime.data.device_dataset import ResidentSet

    load = data.load

    def fewer(*arguments: Any, **more: Any) -> tuple[ResidentSet, ResidentSet]:
        train, test = load(*arguments, **more)
        return ResidentSet(*(part[:samples] for part in train.tensors), transform=train.transform), test

    data.load = fewer


def _use_loader(is_on: bool, task: dict[str, Any]) -> None:
    from cluster_ddp.runtime.world import World

    shard = World.shard
    if is_on:
        World.shard = functools.partialmethod(shard, num_workers=2)


def _inject(fault: dict[str, Any], task: dict[str, Any]) -> None:
    from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer

    step = Checkpointer.step

    def faulty(self: Checkpointer) -> None:
        if (self.steps + 1, self.world.rank) == (fault["step"], fault["rank"]):
            (self.run_dir.path / "fault").write_text(repr(time.time()))
            FAULTS[fault["do"]](self.world.device)
        step(self)

    Checkpointer.step = faulty


def _raise(device: Any) -> None:
    raise RuntimeError("injected by the test")


def _fill_memory(device: Any) -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8, device=device)


def _fail_an_assert(device: Any) -> None:
    """On a GPU the error comes later, with some other call."""
    import torch

    torch.zeros(4, device=device)[torch.tensor([10], device=device)]


FAULTS: dict[str, Callable[[Any], object]] = {
    "raise": _raise,
    "memory": _fill_memory,
    "assert": _fail_an_assert,
    "USR1": lambda device: os.kill(os.getpid(), signal.SIGUSR1),
    "KILL": lambda device: os.kill(os.getpid(), signal.SIGKILL),
    "STOP": lambda device: os.kill(os.getpid(), signal.SIGSTOP),
}


PATCHES: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "shared_gpu": _share_gpu,
    "hide_gpu": _pretend_gpus,
    "capture": _set_capture,
    "dropout": _set_dropout,
    "samples": _cut,
    "loader": _use_loader,
    "fault": _inject,
    "watch_syncs": watch.watch_syncs,
    "timed": watch.note_times,
    "trace": watch.save_profile,
}


def _leave_result(folder: Path) -> None:
    """Let rank 0 write result.json once it is done."""
    from about import about

    from cluster_ddp.mnist.training import Training

    finish = Training.finish

    def leave(self: Training) -> None:
        finish(self)
        if self.world.is_main:
            watch.RESULT["about"] = about(self.world.device)
            watch.RESULT["deterministic"] = {"NCCL_ALGO": _c_environment("NCCL_ALGO")}
            (folder / "result.json").write_text(json.dumps(watch.RESULT))

    Training.finish = leave


def _c_environment(name: str) -> str | None:
    """A variable that C++ may have set, which os.environ does not show."""
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return value.decode() if value else None
