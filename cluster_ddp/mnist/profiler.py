"""A profile of some steps: what the CPU and the GPU did in them, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import profiler

from cluster_ddp import World
from cluster_ddp.contract import File
from cluster_ddp.mnist import cuda_graphs

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a context whose body has a name in a profile."""

_NOTHING = contextlib.nullcontext()


def ranges(device: torch.device, *, enabled: bool) -> Ranges:
    """What names a part of a step: in torch's profiles and, on GPUs, for Nsight Systems (NVTX).

    Args:
        device: of this rank.
        enabled: False names nothing.
    """
    if not enabled:
        return lambda name: _NOTHING
    return _with_nvtx if device.type == "cuda" else profiler.record_function


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiler.record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()


class StepProfiler:
    """Records some steps, and writes profile-rank<k>.json.gz into a folder. The first steps are not recorded.

    Args:
        steps: how many; None records none.
        world: of the ranks.
        folder: exists already.
        after_graphs: first wait for the capture of CUDA graphs.
    """

    def __init__(self, steps: int | None, world: World, folder: Path, *, after_graphs: bool = False) -> None:
        self._world, self._path = world, folder / File.PROFILE.format(world.rank)
        self._profile: profiler.profile | None = None
        if steps is None:
            return
        activities = [profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        skipped = cuda_graphs.STEPS_TO_CAPTURE if after_graphs else 2
        phases = profiler.schedule(skip_first=skipped, wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profiler.profile(activities=activities, schedule=phases, on_trace_ready=self._write)

    def start(self) -> None:
        """Count steps from now on."""
        if self._profile is not None:
            self._profile.start()

    def step(self) -> None:
        """Call it after each step."""
        if self._profile is not None:
            self._profile.step()

    def stop(self) -> None:
        """Write what was recorded, if it was not written yet."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _write(self, profile: profiler.profile) -> None:
        profile.export_chrome_trace(str(self._path))
        self._world.print(f"Profile: {self._path} (open it in ui.perfetto.dev)")
