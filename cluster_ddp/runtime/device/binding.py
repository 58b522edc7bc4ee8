"""What a rank is bound to: the GPUs it may see, and CPUs near its GPU. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger("cluster_ddp")

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""They limit the visible GPUs."""
_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
_PCI = Path("/sys/bus/pci/devices")


def open_driver(descriptors: Path = Path("/proc/self/fd")) -> str | None:
    """Return the open device file that shows that something in this process has started CUDA or HIP; else None.

    torch.cuda.is_initialized does not see what torch.cuda.is_available or another library has started. NVML, which only
    counts GPUs, opens other files (/dev/nvidiactl, /dev/nvidia0).
    """
    for descriptor in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the folder itself, closed by now
            if (target := str(descriptor.readlink())) in _DRIVERS:
                return target
    return None


def own_instance(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables to set so that a rank sees its own MIG instance; empty without MIG instances.

    CUDA enumerates at most one MIG instance, the first of a list (NVIDIA's MIG user guide, "CUDA Device Enumeration"):
    all ranks of a node would use the same one.
    """
    changes = {}
    for name in GPU_VARIABLES:
        entries = [entry.strip() for entry in env.get(name, "").split(",")]
        if len(entries) > 1 and entries[0].startswith("MIG-") and local_rank < len(entries):
            changes[name] = entries[local_rank]
    return changes


def counted_once(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set so that AMD GPUs are not selected twice; empty if they aren't.

    ROCR_VISIBLE_DEVICES applies first. HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP also reads) then counts
    within the remaining GPUs (ROCm's documentation, "GPU isolation techniques"). Slurm may set all to the same list:
    for GPUs 2 and 3, HIP would look for the third and fourth of two GPUs.
    """
    first = env.get("ROCR_VISIBLE_DEVICES")
    if not first:
        return {}
    within = ",".join(map(str, range(len(first.split(",")))))
    return {name: within for name in GPU_VARIABLES[:2] if env.get(name) == first}


def bind_cpus(device: torch.device, cpus_per_task: int, *, told: bool) -> None:
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
