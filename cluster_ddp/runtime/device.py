"""Which device a rank drives, and with how many threads."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cluster_ddp.errors import DeviceError
from cluster_ddp.slurm.environment import Topology


def choose(topology: Topology, visible_gpus: int, env: Mapping[str, str]) -> str:
    """The device of a rank, as torch names it.

    Args:
        topology: the rank's place.
        visible_gpus: how many GPUs torch sees in this process.
        env: the environment, for the error alone.

    Returns:
        "cpu" where no GPU is visible; "cuda:0" where one is (tasks bound one to one, as with --gpus-per-task);
        else "cuda:<local_rank>".

    Raises:
        DeviceError: fewer GPUs visible than ranks on this node.
    """
    if visible_gpus == 0:
        return "cpu"
    bound_one_to_one = visible_gpus == 1 and (
        topology.local_world_size in (None, 1) or topology.gpus_on_node == topology.local_world_size
    )
    if bound_one_to_one:
        return "cuda:0"
    if topology.local_rank < visible_gpus:
        return f"cuda:{topology.local_rank}"
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_LOCALID")
    shown = ", ".join(f"{name}={env.get(name, 'unset')}" for name in names)
    raise DeviceError(
        f"Giving local rank {topology.local_rank} a GPU of its own:",
        f"{visible_gpus} visible to this process ({shown}).",
        "ask for as many GPUs as tasks on each node: --ntasks-per-node=N --gres=gpu:N",
    )


def cpu_threads(topology: Topology, env: Mapping[str, str]) -> int | None:
    """Threads for torch on the CPU; None where OMP_NUM_THREADS is set, which torch follows by itself."""
    return None if env.get("OMP_NUM_THREADS") else cpus(topology)


def cpus(topology: Topology) -> int:
    """The CPUs of a rank, and never more than it may run on: 1 or more."""
    usable = len(os.sched_getaffinity(0))
    if topology.cpus_per_task is not None:
        return min(topology.cpus_per_task, usable)
    return max(1, usable // (topology.local_world_size or 1))
