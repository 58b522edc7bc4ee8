"""Whether each task may use the CPUs that it asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding


@check(detects="a task that may use fewer CPUs than it asked for", on="rank")
def fewer_cpus(site: Site) -> Iterator[Finding]:
    """Compare the CPU affinity with SLURM_CPUS_PER_TASK."""
    asked, usable = site.topology.cpus_per_task or 1, len(os.sched_getaffinity(0))
    if usable < min(asked, os.cpu_count() or asked):
        yield Finding(
            check="fewer_cpus",
            what=f"Tasks may use fewer CPUs than they asked for: {usable} of {asked}.",
            evidence=f"SLURM_CPUS_PER_TASK={asked}, CPU affinity {sorted(os.sched_getaffinity(0))}",
            hint=f"srun --cpus-per-task={asked} (Slurm 22.05 to 23.02 does not take it from the job); no taskset",
            is_warning=True,
        )


@check(detects="more threads than CPUs: OMP_NUM_THREADS times the ranks of the node")
def too_many_threads(site: Site) -> Iterator[Finding]:
    """Multiply OMP_NUM_THREADS with the ranks of the node."""
    text = site.env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    cpus = max(len(os.sched_getaffinity(0)), site.ranks_here * (site.topology.cpus_per_task or 1))
    if text.isdigit() and int(text) > 1 and int(text) * site.ranks_here > cpus:
        yield Finding(
            check="too_many_threads",
            what="The ranks of a node start more threads than it has CPUs for them.",
            evidence=f"OMP_NUM_THREADS={text}, {site.ranks_here} ranks here, {cpus} CPUs for them",
            hint=f"export OMP_NUM_THREADS={max(1, cpus // site.ranks_here)}, or ask for more: --cpus-per-task {text}",
            is_warning=True,
        )
