"""What is said of a job whose tasks are not as many as its GPUs, before the ranks start."""

from __future__ import annotations

import re

from cluster_ddp.agent.options import Options
from cluster_ddp.agent.place import Shape
from cluster_ddp.errors import SpecError, counted


def remark(size: Shape, options: Options) -> str:
    """Return what to say in the job's log; empty if each task that the job asked for drives its GPUs.

    Raises:
        SpecError: srun would refuse to start so many ranks.
    """
    _check_cpus(size, options)
    ranks, gpus, each = size.ranks_per_node, size.gpus_per_node, options.gpus_per_task
    if gpus is None:
        return ""
    if ranks * each == gpus:
        if size.tasks_per_node == ranks:
            return ""
        asked = counted(size.tasks_per_node, "task")
        return f"The job has {asked} and {gpus} GPUs on each node: starting {counted(ranks, 'rank')} there."
    needed = f"{counted(ranks, 'rank')} on each node, with {counted(each, 'GPU')} each"
    fault = "some have no GPU of their own" if ranks * each > gpus else "the others stay idle"
    hint = f"--ntasks-per-node={max(1, gpus // each)}, or cluster-ddp launch --ranks-per-node {max(1, gpus // each)}"
    return f"warning: Starting {needed}: the job has {counted(gpus, 'GPU')} there; {fault}.\n  Hint: {hint}"


def _check_cpus(size: Shape, options: Options) -> None:
    ranks, cpus = size.ranks_per_node, size.node_cpus
    may_be_more = size.is_overcommitted or any(re.match(r"--overc|-\w*O", one) for one in options.srun_options)
    if options.launcher == "srun" and cpus is not None and ranks > cpus and not may_be_more:
        asked = f"Starting {counted(ranks, 'rank')} on each node:"
        found = f"the job has {counted(cpus, 'CPU')} there, and srun gives each rank one of its own."
        raise SpecError(asked, found, f"ask for them: --ntasks-per-node={ranks}, or --cpus-per-task={ranks}")
