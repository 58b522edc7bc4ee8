"""NVIDIA's GPUs of this job on this node, by NVML (nvmlDeviceGetUtilizationRates and the like).

nvidia-ml-py is NVIDIA's own binding. Without a driver, or on other makers' GPUs, there is nothing to sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""The reasons of lower clocks that a user should know of: hardware slowdown, thermal slowdowns, power brake (nvml.h,
nvmlClocksEventReason*)."""


class Gpus:
    """The GPUs that this job may use on this node.

    Raises:
        Exception: NVML has no driver (pynvml.NVMLError).
    """

    def __init__(self, env: Mapping[str, str], nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        found = [known(partial(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
        handles = [handle for handle in found if handle is not None]  # without what the control group hides
        self._handles = [handles[index] for index in chosen(env, [nvml.nvmlDeviceGetUUID(one) for one in handles])]

    def sample(self) -> list[dict[str, float]]:
        """Return the figures of each GPU. What a GPU does not tell is left out.

        Keys: `utilization` (0 to 1: the part of the last moments in which a kernel ran), `memory` and `memory_total`
        (bytes), `power_w`, `temperature_c`, `throttled` (0 or 1).
        """
        return [self._sample(handle) for handle in self._handles]

    def _sample(self, handle: Any) -> dict[str, float]:
        nvml, found = self._nvml, {}
        memory = known(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        readings: dict[str, Callable[[], float]] = {
            "utilization": lambda: min(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 100) / 100,
            "memory": lambda: memory.used,
            "memory_total": lambda: memory.total,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled": lambda: float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & THROTTLED != 0),
        }
        for name, read in readings.items():
            value = known(read)
            if value is not None:
                found[name] = float(value)
        return found


def known(read: Callable[[], Any]) -> Any:
    """Return what NVML answers; None if it raises."""
    with contextlib.suppress(Exception):  # NVML raises for what a GPU does not support, such as its power
        return read()
    return None


def chosen(env: Mapping[str, str], uuids: list[str]) -> list[int]:
    """Return the indices of this job's GPUs on this node, among those that NVML shows; all if nothing says which.

    A task's own list may be shorter than the node's: SLURM_STEP_GPUS or SLURM_JOB_GPUS has all, by their numbers on the
    node. If NVML shows too few for these numbers, the job's control group hides the others, and all are the job's.
    Without Slurm's lists, CUDA_VISIBLE_DEVICES counts (of local rank 0): it may also say that there is none.
    """
    names = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or env.get("CUDA_VISIBLE_DEVICES")
    every = list(range(len(uuids)))
    if names is None:
        return every
    found: list[int] = []
    for word in (part.strip() for part in names.split(",")):
        if word.startswith("MIG-") or (word.isdigit() and int(word) >= len(uuids)):
            return every
        of_word = (
            [int(word)] if word.isdigit() else [at for at, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        )
        if not of_word:  # CUDA stops at the first name that it does not know, such as -1
            break
        found += of_word
    return found
