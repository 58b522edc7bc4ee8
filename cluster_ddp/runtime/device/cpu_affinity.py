"""The CPUs of a rank: near its GPU; or, of ranks that one process forks, an equal share of the node's."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

if TYPE_CHECKING:  # the process that forks the ranks divides the CPUs
    import torch

log = logging.getLogger("cluster_ddp")

_PCI = Path("/sys/bus/pci/devices")
_CPUS = Path("/sys/devices/system/cpu")


def bind(device: torch.device, cpus_per_task: int, *, told: bool) -> None:
    """Bind this process to those of its CPUs that are near its GPU, if there are at least `cpus_per_task` of them.

    From other CPUs, copies and launches take longer. Slurm may have bound the task to CPUs of another socket: its
    default alternates between sockets, whatever GPUs the tasks have. Then nothing is changed; that is logged if `told`.
    """
    usable, near = os.sched_getaffinity(0), _near(device)
    if not near or usable <= near:
        return
    if len(usable & near) >= cpus_per_task:
        os.sched_setaffinity(0, usable & near)
    elif told:
        log.warning(
            "%d of this task's %d CPUs are near its GPU (%s). Hint: srun --distribution=block:block, or "
            "--gres-flags=enforce-binding; the CPUs near each GPU: nvidia-smi topo -m",
            *(len(usable & near), len(usable), device),
        )


def _near(device: torch.device) -> set[int]:
    """The CPUs of the GPU's socket (sysfs-bus-pci, local_cpulist); empty if unknown."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return parse((_PCI / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, no sysfs, a virtual machine's odd list
        return set()


def parse(text: str) -> set[int]:
    """Return the CPUs in a list such as "0-15,32-47". Raises ValueError if it is not such a list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def share(cpus: set[int], local_rank: int, ranks: int, env: Mapping[str, str]) -> set[int]:
    """Return the CPUs for one of a node's ranks: neighbours, in equal numbers for all ranks, give or take one.

    All ranks get all CPUs if there are fewer CPUs than ranks, or more than SLURM_CPUS_ON_NODE (then Slurm does not bind
    tasks).
    """
    given = Variables(env).integer(*variables.CPUS_ON_NODE)
    if len(cpus) < ranks or (given is not None and len(cpus) > given):
        return cpus
    ordered = sorted(cpus, key=_place)
    return set(ordered[len(cpus) * local_rank // ranks : len(cpus) * (local_rank + 1) // ranks])


def _place(cpu: int) -> tuple[int, int, int]:
    """Socket, core, CPU: so the hyper-threads of a core are neighbours, whatever their numbers."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), cpu
    except OSError:
        return 0, cpu, cpu
