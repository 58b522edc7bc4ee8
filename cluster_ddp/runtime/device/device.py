"""The devices of a rank, and its number of threads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from cluster_ddp.errors import DeviceError, counted
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.device import binding
from cluster_ddp.slurm.topology import Topology

# What cuBLAS needs for the same bits in every run; it reads this on first use.
_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_up(topology: Topology, *, cuda: bool, deterministic: bool) -> list[torch.device]:
    """Choose and set up this rank's device. Call it before the device is used and before the process group is made.

    With several GPUs per task, the next ones follow it. On a CPU, the same device stands in for each. For `cuda` and
    `deterministic` see `distributed`.

    Raises:
        DeviceError: GPUs don't match the ranks, torch sees none of those that Slurm gave, or CUDA can't start.
    """
    if deterministic:
        os.environ.setdefault(*_CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True)
    device = torch.device(_choose_visible(topology) if cuda else "cpu")
    if device.type == "cuda":
        _start(device)
        if topology.cpus_per_task is not None:
            binding.bind_cpus(device, topology.cpus_per_task, told=topology.rank == 0)
    elif (threads := cpu_threads(topology, os.environ)) is not None:
        torch.set_num_threads(threads)
    first = device.index or 0
    numbers = range(first, first + topology.gpus_per_task)
    return [torch.device(device.type, number) if device.type == "cuda" else device for number in numbers]


def _start(device: torch.device) -> None:
    """Make it the current device, which starts CUDA. (NVML also counts GPUs if the driver is too old.)"""
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"Starting {device} with torch {torch.__version__}:",
            f"{str(error).splitlines()[0]} ({_shown(os.environ)})",
            _fitting_wheel(str(error)) or "check for an old driver, or a GPU that is in use or broken: nvidia-smi",
        ) from error


def _fitting_wheel(words: str) -> str:
    """The hint for a driver that is too old for this torch, as CUDAFunctions.cpp says it ("found version 12020")."""
    found = re.search(r"too old \(found version (\d+)\d{3}\)", words)
    if not found or not torch.version.cuda:
        return ""
    update = f"ask for a driver that has CUDA {torch.version.cuda} (nvidia-smi)"
    # A wheel for CUDA 12.6 runs with any driver for CUDA 12. The last torch that has one is 2.14 (pytorch#190385).
    older = 'pip install "torch<2.15" torchvision --index-url https://download.pytorch.org/whl/cu126'
    return f"{older}; or {update}" if int(found[1]) == 12 and not torch.version.cuda.startswith("12.") else update


def _choose_visible(topology: Topology) -> str:
    if torch.version.hip is not None:
        os.environ.update(binding.counted_once(os.environ))
    if instance := binding.own_instance(os.environ, topology.local_rank):
        if (first := next(iter(instance))) and binding.open_driver():
            raise DeviceError(
                f"Giving local rank {topology.local_rank} the MIG instance {instance[first]}:",
                f"this process has started CUDA already, with {first}={os.environ[first]}: it sees the first one only.",
                "call torch.cuda.is_available() and its like inside cluster_ddp.distributed(), which sets the variable",
            )
        os.environ.update(instance)
    count = torch.cuda.device_count()
    if count == 0 and topology.gpus_on_node and not os.environ.get(Env.DUMMY_GPUS):
        raise DeviceError(
            f"Computing on a GPU (Slurm gave {counted(topology.gpus_on_node, 'GPU')} on this node):",
            f"torch {torch.__version__} sees none ({_shown(os.environ)}).",
            "check that torch fits the driver: nvidia-smi; python -m torch.utils.collect_env. "
            "To compute on the CPU instead: --no-cuda, or distributed(cuda=False)",
        )
    one = instance and count and topology.gpus_per_task == 1
    return "cuda:0" if one else choose(topology, count, os.environ)


def choose(topology: Topology, visible_gpus: int, env: Mapping[str, str]) -> str:
    """Return the name of a rank's device, as torch has it; with several GPUs per task, of the first one.

    It is "cpu" if torch sees no GPU in this process; "cuda:0" if the task sees its own GPUs only (as with
    --gpus-per-task, or where each rank has a container; NCCL refuses two ranks with the same GPU); else
    "cuda:<local_rank * gpus_per_task>".

    Raises:
        DeviceError: fewer GPUs are visible than needed for the ranks of this node.
    """
    if visible_gpus == 0:
        return "cpu"
    each = topology.gpus_per_task
    if visible_gpus == each and _sees_its_own_only(topology, env):
        return "cuda:0"
    first = topology.local_rank * each
    if first + each <= visible_gpus:
        return f"cuda:{first}"
    number = "N" if each == 1 else f"{each}*N"
    raise DeviceError(
        f"Giving local rank {topology.local_rank} {'a GPU' if each == 1 else f'{each} GPUs'} of its own:",
        f"{visible_gpus} visible to this process ({_shown(env)}).",
        f"ask for {'as' if each == 1 else f'{each} times as'} many GPUs as tasks on each node: "
        f"--ntasks-per-node=N --gres=gpu:{number}",
    )


def _sees_its_own_only(topology: Topology, env: Mapping[str, str]) -> bool:
    """Whether as many GPUs as a rank needs are this rank's, and not the first ones of the whole node's."""
    each, ranks = topology.gpus_per_task, topology.local_world_size
    if ranks in (None, 1):
        return True
    if topology.gpus_on_node is None:  # of a list for several ranks, CUDA shows the first MIG instance only
        return env.get("CUDA_VISIBLE_DEVICES", "").count(",") < each
    return topology.gpus_on_node == each * ranks


def _shown(env: Mapping[str, str]) -> str:
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_LOCALID")
    set_too = [name for name in binding.GPU_VARIABLES[1:] if name in env]
    return ", ".join(f"{name}={env.get(name, 'unset')}" for name in (*names, *set_too))


def cpu_threads(topology: Topology, env: Mapping[str, str]) -> int | None:
    """Return the number of threads for torch on the CPU; None if OMP_NUM_THREADS is set, which torch reads itself."""
    return None if env.get("OMP_NUM_THREADS") else cpus(topology)


def cpus(topology: Topology) -> int:
    """Return the number of CPUs of a rank, 1 or more, and at most the number that it may run on."""
    usable = len(os.sched_getaffinity(0))
    if topology.cpus_per_task is not None:
        return min(topology.cpus_per_task, usable)
    return max(1, usable // (topology.local_world_size or 1))
