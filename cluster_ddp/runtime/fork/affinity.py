"""A node's CPUs, shared out among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_CPUS = Path("/sys/devices/system/cpu")


def share(cpus: set[int], local_rank: int, ranks: int, env: Mapping[str, str]) -> set[int]:
    """The CPUs for one rank: neighbours, as many as for any other, give or take one.

    Args:
        cpus: those that the ranks may run on.
        local_rank: 0 … ranks - 1.
        ranks: how many share them.
        env: the environment.

    Returns:
        All of them where there are fewer than ranks, or where Slurm binds nobody: more than it has given to this job.
    """
    given = Variables(env).integer(*variables.CPUS_ON_NODE)
    if len(cpus) < ranks or (given is not None and len(cpus) > given):
        return cpus
    ordered = sorted(cpus, key=_place)
    return set(ordered[len(cpus) * local_rank // ranks : len(cpus) * (local_rank + 1) // ranks])


def _place(cpu: int) -> tuple[int, int, int]:
    """Socket, core, CPU: the hyper-threads of a core are neighbours so, whatever their numbers."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), cpu
    except OSError:
        return 0, cpu, cpu
