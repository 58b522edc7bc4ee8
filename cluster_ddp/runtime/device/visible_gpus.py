"""Which GPUs a rank's process may see, where the list that Slurm gives to all ranks of a node would not do."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables that limit it."""


def own(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What to set so that a rank sees a MIG instance of its own; nothing where there are no such instances.

    CUDA enumerates one MIG instance at most, the first of a list (NVIDIA's MIG user guide, "CUDA Device Enumeration"):
    all ranks of a node would take the same one.

    Args:
        env: such as os.environ; only read.
        local_rank: of the rank.
    """
    changes = {}
    for name in NAMES:
        entries = [entry.strip() for entry in env.get(name, "").split(",")]
        if len(entries) > 1 and entries[0].startswith("MIG-") and local_rank < len(entries):
            changes[name] = entries[local_rank]
    return changes


def counted_once(env: Mapping[str, str]) -> dict[str, str]:
    """What to set so that an AMD GPU is not selected twice; nothing where it isn't.

    ROCR_VISIBLE_DEVICES is applied first, and HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP takes for it)
    counts within what is left (ROCm's documentation, "GPU isolation techniques"). Slurm may set all to the same list:
    of GPUs 2 and 3, HIP would look for the third and fourth of two.

    Args:
        env: such as os.environ; only read.
    """
    first = env.get("ROCR_VISIBLE_DEVICES")
    if not first:
        return {}
    within = ",".join(map(str, range(len(first.split(",")))))
    return {name: within for name in NAMES[:2] if env.get(name) == first}
