"""Get PyTorch DDP training onto a Slurm cluster and keep it alive there.

    import cluster_ddp

    with cluster_ddp.distributed() as world:
        model = world.wrap(Model())
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)

    job = cluster_ddp.submit(cluster_ddp.JobSpec(name="fit", nodes=2, gpus_per_node=4), train)

Importing the package is cheap; torch is imported when `distributed` or `World` is first used. In a job that
`cluster_ddp.submit` made, warnings before the time limit (USR1, USR2) are noted from the import on.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from cluster_ddp._version import __version__

if TYPE_CHECKING:
    from cluster_ddp.jobs.job import Job
    from cluster_ddp.launch.spec import JobSpec
    from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
    from cluster_ddp.runtime.distributed import distributed
    from cluster_ddp.runtime.world import World
    from cluster_ddp.slurm.topology import Topology
    from cluster_ddp.submit import submit

__all__ = ["Checkpointer", "Job", "JobSpec", "Topology", "World", "__version__", "distributed", "submit"]

_HOMES = {
    "Checkpointer": "cluster_ddp.runtime.checkpoint.checkpointer",
    "Job": "cluster_ddp.jobs.job",
    "JobSpec": "cluster_ddp.launch.spec",
    "Topology": "cluster_ddp.slurm.topology",
    "World": "cluster_ddp.runtime.world",
    "distributed": "cluster_ddp.runtime.distributed",
    "submit": "cluster_ddp.submit",
}

# Our batch scripts start Python with the warnings ignored: it would die of one that comes before it has a handler.
# Elsewhere hardly anybody ignores them, and an import installs no handler.
if signal.SIG_IGN in (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)):
    from cluster_ddp.runtime import stop_signals

    stop_signals.note_early(stop_signals.WARNINGS, instead_of=(signal.SIG_IGN,))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
