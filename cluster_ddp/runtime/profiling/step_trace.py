"""A trace of some steps: what the CPU and the GPU did in them, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import profiler

from cluster_ddp.protocol import Env
from cluster_ddp.runtime.run_dir import fenced_writes

log = logging.getLogger("cluster_ddp")
_NOTHING = contextlib.nullcontext()


class StepTrace:
    """Records some steps with torch.profiler, and writes them to a file. Call `step` after each step.

    Args:
        steps: how many; None records none.
        path: of the file, in Chrome's trace format, compressed by gzip if it ends with .gz. Its folder exists.
        device: of this rank.
        after: how many steps come before; 1 or more. The first ones of a training are not typical.
    """

    is_asked = False
    """Whether one of this process was asked to record steps."""

    def __init__(self, steps: int | None, path: Path, device: torch.device, *, after: int) -> None:
        self._path, self._has_begun = path, False
        self._profile: profiler.profile | None = None
        if steps is None:
            return
        StepTrace.is_asked = True
        activities = [profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        # One more step is not recorded: the profiler starts in it, which takes time.
        phases = profiler.schedule(skip_first=after - 1, wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profiler.profile(activities=activities, schedule=phases, on_trace_ready=self._write)

    def step(self) -> None:
        """Note the end of a step."""
        if self._profile is None:
            return
        if self._has_begun:
            self._profile.step()
        else:
            self._profile.start()
            self._has_begun = True

    def stop(self) -> None:
        """Write what was recorded, if it was not written yet."""
        profile, self._profile = self._profile, None
        if profile is not None and self._has_begun:
            profile.stop()

    def _write(self, profile: profiler.profile) -> None:
        try:
            fenced_writes.check()
            profile.export_chrome_trace(str(self._path))
        except OSError as error:
            log.warning("The trace was not written: %s: %s", self._path, error.strerror)
            return
        log.info("Trace: %s (open it in ui.perfetto.dev)", self._path)


def asked_steps(env: Mapping[str, str]) -> int | None:
    """Return the number of steps to trace, as `submit --trace` says; None for none."""
    text = env.get(Env.TRACE, "")
    return int(text) if text.isdigit() and int(text) else None


def trace_range(name: str) -> AbstractContextManager[object]:
    """Name a part of a step, such as the forward pass, in the trace (`--trace`). Without a trace it does nothing.

    On GPUs, Nsight Systems shows the name, too (NVTX).

        with cluster_ddp.trace_range("forward"):
            output = model(images)
    """
    if not StepTrace.is_asked:
        return _NOTHING
    return _with_nvtx(name) if torch.cuda.is_initialized() else profiler.record_function(name)


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with torch.cuda.nvtx.range("{}", name), profiler.record_function(name):
        yield
