"""The CPUs of a node, divided among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_CPUS = Path("/sys/devices/system/cpu")


def share(cpus: set[int], local_rank: int, ranks: int, env: Mapping[str, str]) -> set[int]:
    """Return the CPUs for one rank: neighbours, in equal numbers for all ranks, give or take one.

    Args:
        cpus: the CPUs that the ranks may run on.
        local_rank: 0 … ranks - 1.
        ranks: number of ranks that share them.
        env: an environment, such as os.environ.

    Returns:
        A share of `cpus`; all of them if there are fewer CPUs than ranks, or more than SLURM_CPUS_ON_NODE (then Slurm
        does not bind tasks).
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
