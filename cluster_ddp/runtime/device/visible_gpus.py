"""The GPUs that a rank's process may see, if the list that Slurm gives to all ranks of a node is not suitable."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables that limit the visible GPUs."""
_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")


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


def own(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables to set so that a rank sees its own MIG instance; empty without MIG instances.

    CUDA enumerates at most one MIG instance, the first of a list (NVIDIA's MIG user guide, "CUDA Device Enumeration"):
    all ranks of a node would use the same one.
    """
    changes = {}
    for name in NAMES:
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
    return {name: within for name in NAMES[:2] if env.get(name) == first}
