"""The ranks of one node, if one task stands for all of them: what a task of its own would have given to each.

For equal nodes and block distribution, which the templates request. The variables' names are in `variables`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.run.names import Env
from cluster_ddp.slurm import variables
from cluster_ddp.slurm.variables import Variables

_CPUS = Path("/sys/devices/system/cpu")


def of_task(env: Mapping[str, str]) -> list[int]:
    """Return the ranks of a task's node, by its environment."""
    ranks, node_rank = int(env["LOCAL_WORLD_SIZE"]), int(env["NODE_RANK"])
    return [*range(node_rank * ranks, (node_rank + 1) * ranks)]


def environment(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the environment that a task for one rank alone would have, from that of the node's task."""
    here = of_task(env)
    values = {"RANK": here[local_rank], "LOCAL_RANK": local_rank}
    changes: dict[str, object] = {**values, **_launchers(env, local_rank)}
    kept = {name: value for name, value in env.items() if name not in changes}
    return kept | {name: str(value) for name, value in changes.items() if value is not None}


def _launchers(env: Mapping[str, str], local_rank: int) -> dict[str, object]:
    """The launcher's variables with their values: those that the node's task has. None: it must be unset."""
    here, world_size = of_task(env), int(env["WORLD_SIZE"])
    rank, ranks, nodes = here[local_rank], len(here), world_size // len(here)
    values: dict[tuple[str, ...], object] = {
        variables.RANK: rank,
        variables.LOCAL_RANK: local_rank,
        variables.WORLD_SIZE: world_size,
        variables.TASKS_PER_NODE: f"{ranks}(x{nodes})" if nodes > 1 else ranks,
        variables.NTASKS_PER_NODE: ranks,
        variables.CPUS_PER_TASK: _cpus_per_task(env, ranks),
        variables.TRES_PER_TASK: _tres_per_task(env, ranks),
        (Env.CPUS_PER_TASK,): None,
        variables.DISTRIBUTION: _distribution(env, ranks),
        variables.RANKS_ON_NODE: ",".join(map(str, here)),
        ("SUBMITIT_LOCAL_GLOBALID",): rank,
        ("SUBMITIT_LOCAL_LOCALID",): local_rank,
        ("SUBMITIT_LOCAL_NTASKS",): world_size,
    }
    return {name: value for names, value in values.items() for name in names if name in env}


def _cpus_per_task(env: Mapping[str, str], ranks: int) -> int | None:
    v = Variables(env)
    if Env.CPUS_PER_TASK in env:
        return v.integer(Env.CPUS_PER_TASK)
    return max(1, (v.integer(*variables.CPUS_PER_TASK) or 1) // ranks)


def _tres_per_task(env: Mapping[str, str], ranks: int) -> str | None:
    cpus, kept = _cpus_per_task(env, ranks), []
    for one in (Variables(env).text(*variables.TRES_PER_TASK) or "").split(","):
        match = re.fullmatch(r"(cpu[=:])\d+", one)
        kept += [one] if match is None else [f"{match[1]}{cpus}"] if cpus else []
    return ",".join(kept) or None


def _distribution(env: Mapping[str, str], ranks: int) -> str | None:
    """srun's default is "cyclic" for one task on each node, and "block" for more (srun(1))."""
    said = Variables(env).text(*variables.DISTRIBUTION)
    return "block" if said == "cyclic" and ranks > 1 else said


def share_of_cpus(cpus: set[int], local_rank: int, ranks: int, env: Mapping[str, str]) -> set[int]:
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
