"""NVIDIA's GPUs of this job on this node, by NVML (nvmlDeviceGetUtilizationRates and the like).

nvidia-ml-py is NVIDIA's own binding. Without a driver, or on other makers' GPUs, there is nothing to sample.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cluster_ddp.run.names import Env

THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""The reasons of lower clocks that a user should know of: hardware slowdown, thermal slowdowns, power brake (nvml.h,
nvmlClocksEventReason*)."""

_PROC = Path("/proc")
_MARKS = ("SLURM_JOB_ID", "SLURM_STEP_ID", Env.RUN_DIR, Env.LOCAL_JOB_ID)
"""Variables that tell this start of the ranks from other processes on the node."""


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
        self._marks = {f"{name}={env[name]}".encode() for name in _MARKS if name in env}
        self._counters = [self._energy_mj(handle) for handle in self._handles]

    def sample(self) -> list[dict[str, float]]:
        """Return the figures of each GPU. What a GPU does not tell is left out.

        Keys: `utilization` (0 to 1: the part of the last moments in which a kernel ran), `memory` and `memory_total`
        (bytes), `power_w`, `energy_j` (since the sample before, or since the first moment), `temperature_c`,
        `throttled` (0 or 1).
        """
        return [self._sample(at, handle) for at, handle in enumerate(self._handles)]

    def shared(self) -> list[bool]:
        """Return which GPUs others have used, too, now, as far as that can be seen.

        A part of a GPU (MIG) has others beside it. Of a whole one NVML lists the processes. They are known if this
        process is among them: in a container they may have other numbers.
        """
        of_each, own = [self._processes(handle) for handle in self._handles], os.getpid()
        are_known = any(own in pids for pids in of_each) and not _is_others(own, self._marks)
        others = [are_known and any(_is_others(pid, self._marks) for pid in pids) for pids in of_each]
        return [one or self._is_divided(handle) for one, handle in zip(others, self._handles)]

    def _is_divided(self, handle: Any) -> bool:
        mode = known(lambda: self._nvml.nvmlDeviceGetMigMode(handle))  # now, and after a reset
        return mode is not None and mode[0] == 1

    def _processes(self, handle: Any) -> set[int]:
        """The processes that compute on a GPU, as far as NVML tells."""
        names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
        return {one.pid for name in names for one in known(partial(self._ask, name, handle)) or ()}

    def _ask(self, name: str, handle: Any) -> Any:
        return getattr(self._nvml, name)(handle)

    def _energy_mj(self, handle: Any) -> int | None:
        """The energy since the driver was loaded, in mJ; None on GPUs before Volta (NVML_ERROR_NOT_SUPPORTED)."""
        found: int | None = known(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return found

    def _energy_j(self, at: int, handle: Any) -> float | None:
        """The energy since the call before; None if the counter is not known, or began anew with another driver."""
        before, now = self._counters[at], self._energy_mj(handle)
        self._counters[at] = now
        return None if before is None or now is None or now < before else (now - before) / 1000

    def _sample(self, at: int, handle: Any) -> dict[str, float]:
        nvml, found = self._nvml, {}
        memory = known(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        readings: dict[str, Callable[[], float | None]] = {
            "utilization": lambda: min(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 100) / 100,
            "memory": lambda: memory.used,
            "memory_total": lambda: memory.total,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "energy_j": lambda: self._energy_j(at, handle),
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


def _is_others(pid: int, marks: set[bytes]) -> bool:
    """Whether a process that uses a GPU is not of these ranks: it lacks what their environments have."""
    folder = _PROC / str(pid)
    try:
        if (folder / "comm").read_text().startswith("nvidia-cuda-mps"):  # it computes for its clients
            return False
        return not marks <= set((folder / "environ").read_bytes().split(b"\0"))
    except PermissionError:  # another user's
        return True
    except OSError:  # it has ended, or is hidden
        return False


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
        named = [at for at, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        of_word = [int(word)] if word.isdigit() else named
        if not of_word:  # CUDA stops at the first name that it does not know, such as -1
            break
        found += of_word
    return found
