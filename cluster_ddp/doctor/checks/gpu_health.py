"""Whether the GPUs of a node are there and well, by NVML.

NVML tells XIDs to those only that wait for them when they happen. What the graver ones leave behind can be read: memory
errors, and rows of the memory that are to be replaced or can't be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from cluster_ddp.doctor.checks.check_types import Site, node_check
from cluster_ddp.doctor.checks.task_allocation import torch_versions
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.runtime.profiling.nvml import THROTTLED, chosen, known


@node_check
def gpu_health(site: Site, nvml: Any = None) -> Iterator[Finding]:
    """Detect GPUs: fewer than Slurm gave, ECC errors, memory rows that can't be replaced, throttling, NVLinks that are
    down, others' processes, a driver older than torch's CUDA.

    `nvml` is the module pynvml, or a stand-in.
    """
    if not _has_nvidia_gpus(site):
        return
    nvml = nvml or _pynvml()
    sick = f"leave the node out: --exclude={site.host}; look at: nvidia-smi -q"
    try:
        nvml.nvmlInit()
        handles = _handles(nvml)
    except Exception as error:  # pynvml.NVMLError
        what = "The driver of the GPUs does not answer."
        yield Finding(what=what, evidence=f"NVML: {error}", hint=sick, sick_nodes=(site.host,))
        return
    if len(handles) < _expected(site):
        what = "A node has fewer GPUs than Slurm gave the job."
        evidence = f"NVML shows {len(handles)}, SLURM_GPUS_ON_NODE={site.topology.gpus_on_node}"
        yield Finding(what=what, evidence=evidence, hint=sick, sick_nodes=(site.host,))
    uuids = [known(partial(nvml.nvmlDeviceGetUUID, handle)) or "" for handle in handles]
    own = [handles[index] for index in chosen(site.env, uuids)]
    for index, handle in enumerate(own):
        yield from _memory_of_gpu(site, nvml, index, handle, sick)
        yield from _use_of_gpu(nvml, index, handle, sick)
    yield from _nvlinks(nvml, own, sick)
    yield from _driver(site, nvml)


def _has_nvidia_gpus(site: Site) -> bool:
    return bool(site.real_gpus) and "ROCR_VISIBLE_DEVICES" not in site.env


def _expected(site: Site) -> int:
    """Return how many GPUs this task should see: as it is told, since another task's may be hidden from it."""
    names = site.env.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return site.real_gpus
    whole = [name for name in names.split(",") if name.strip() and not name.strip().startswith("MIG-")]
    return min(len(whole), site.real_gpus)


def _memory_of_gpu(site: Site, nvml: Any, index: int, handle: Any, sick: str) -> Iterator[Finding]:
    ecc = known(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    if ecc:
        what, evidence = "A GPU has uncorrected memory errors (ECC).", f"GPU {index}: {ecc} since the driver was loaded"
        yield Finding(what=what, evidence=evidence, hint=sick, sick_nodes=(site.host,))
    _, _, is_pending, has_failed = known(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    if is_pending or has_failed:
        what = f"Memory of a GPU is broken: a row {'can not' if has_failed else 'is to'} be replaced."
        evidence = f"GPU {index}: {'remapping has failed' if has_failed else 'remapped at its next reset'} (XID 63, 64)"
        yield Finding(what=what, evidence=evidence, hint=sick, is_warning=not has_failed, sick_nodes=(site.host,))


def _use_of_gpu(nvml: Any, index: int, handle: Any, sick: str) -> Iterator[Finding]:
    if (known(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0) & THROTTLED:
        temperature = known(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        what, evidence = "A GPU is slowed down by heat or power.", f"GPU {index}: {temperature} °C"
        yield Finding(what=what, evidence=evidence, hint=sick, is_warning=True)
    if others := known(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)):
        pids = ", ".join(str(process.pid) for process in others)
        what, evidence = "Other processes use a GPU of this job.", f"GPU {index}: process {pids}"
        yield Finding(what=what, evidence=evidence, hint=f"if they are yours, end them; else {sick}", is_warning=True)


def _nvlinks(nvml: Any, handles: Sequence[Any], sick: str) -> Iterator[Finding]:
    """Compare how many NVLinks of the GPUs are up. Links that a board does not use are down on all."""

    def is_up(handle: Any, link: int) -> bool:
        return bool(known(lambda: nvml.nvmlDeviceGetNvLinkState(handle, link)))

    up = [sum(is_up(handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)) for handle in handles]
    if len(set(up)) > 1:
        what = "A GPU has fewer NVLinks up than others of its node."
        evidence = ", ".join(f"GPU {index}: {count}" for index, count in enumerate(up))
        hint = f"compare with what the node should have: nvidia-smi nvlink -s; {sick}"
        yield Finding(what=what, evidence=evidence, hint=hint, is_warning=True)


def _driver(site: Site, nvml: Any) -> Iterator[Finding]:
    """NVIDIA's drivers run programs of their own CUDA major version and of older ones (CUDA compatibility guide)."""
    built_for = (torch_versions() or {}).get("cuda", "None")
    version = known(nvml.nvmlSystemGetCudaDriverVersion_v2)
    if version and built_for[:1].isdigit() and int(built_for.partition(".")[0]) > version // 1000:
        yield Finding(
            what="The driver is too old for this torch.",
            evidence=f"torch is built for CUDA {built_for}, the driver has {version // 1000}.{version % 1000 // 10}",
            hint=f"install torch for CUDA {version // 1000}: pip install torch --index-url …/whl/cu{version // 1000}…",
            sick_nodes=(site.host,),
        )


def gpus_of_rank(site: Site) -> list[str]:
    """Return the UUIDs of the GPUs that this rank will drive, by NVML; empty if unknown."""
    count = site.topology.gpus_per_task
    if not _has_nvidia_gpus(site):
        return []
    uuids = known(_uuids) or []
    task_only = {name: value for name, value in site.env.items() if name == "CUDA_VISIBLE_DEVICES"}
    seen = [uuids[index] for index in chosen(task_only, uuids)]
    first = site.topology.local_rank * count if len(seen) > count else 0
    return seen[first : first + count]


def _pynvml() -> Any:
    import pynvml  # type: ignore[import-untyped]  # needed where there are GPUs only

    return pynvml


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _uuids() -> list[str]:
    nvml = _pynvml()
    nvml.nvmlInit()
    return list(map(nvml.nvmlDeviceGetUUID, _handles(nvml)))
