"""The CPUs near a rank's GPU: those of its socket. From other CPUs, copies and launches take longer."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("cluster_ddp")

_PCI = Path("/sys/bus/pci/devices")


def bind(device: torch.device, cpus_per_task: int, *, told: bool) -> None:
    """Bind this process to those of its CPUs that are near its GPU, if there are at least `cpus_per_task` of them.

    Slurm may have bound the task to CPUs of another socket: its default alternates between sockets, whatever GPUs the
    tasks have. Then nothing is changed, and a warning is logged.

    Args:
        device: the rank's GPU.
        cpus_per_task: number of CPUs requested for the rank.
        told: whether to log the warning.
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
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return parse((_PCI / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):  # an older torch, no sysfs, a virtual machine's odd list
        return set()


def parse(text: str) -> set[int]:
    """Return the CPUs in a list such as "0-15,32-47".

    Raises:
        ValueError: it is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
