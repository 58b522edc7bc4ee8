"""sick-nodes.txt: nodes that were found at fault. The job's agent leaves them out (`--restarts`).

Errors of the user's code never belong there. Nor do nodes that are accused by a rank that may be cut off itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.errors import ClusterDDPError, RunDirError, printable
from cluster_ddp.run.names import Env, File
from cluster_ddp.runtime.run_dir.fenced_writes import append
from cluster_ddp.slurm import hostlist, variables
from cluster_ddp.slurm.variables import Variables

_LONGEST = 300


def may_accuse(reached: Mapping[int, str], world_size: int, env: Mapping[str, str]) -> bool:
    """Return whether one who reaches these ranks may say that nodes of the others are at fault.

    To a node that is cut off, all others look dead. So the accuser must reach more than half of the ranks, itself
    included. If it is exactly half, as with two nodes, the half with the batch host may: the job does not survive the
    loss of that node.
    """
    if 2 * len(reached) != world_size:
        return 2 * len(reached) > world_size
    with contextlib.suppress(ClusterDDPError):  # a list that can't be read
        nodes = hostlist.of_variable(Variables(env), *variables.JOB_NODELIST, *variables.NODELIST)
        return next(iter(nodes), None) in reached.values()  # the first one runs the batch script (sbatch(1))
    return False


def note(env: Mapping[str, str], node: str, why: str) -> None:
    """Append a node, by its name in Slurm, and what is wrong with it; without `Env.RUN_DIR`, nothing is done.

    If it can't be written, nothing is said: the job then ends as it would without the note.
    """
    if not (run_dir := env.get(Env.RUN_DIR)) or not node or len(node.split()) != 1:
        return
    line = f"{node} {printable(' '.join(why.split()))[:_LONGEST]}\n"
    with contextlib.suppress(OSError, RunDirError):
        append(Path(run_dir) / File.SICK_NODES, line.encode())
