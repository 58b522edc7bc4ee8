"""Get PyTorch DDP training onto a Slurm cluster and keep it alive there.

    import cluster_ddp

    with cluster_ddp.distributed() as world:
        model = world.wrap(Model())
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)

    job = cluster_ddp.submit(cluster_ddp.JobSpec(name="fit", nodes=2, gpus_per_node=4), train)

Scripts need these names only; the modules below may change. Importing the package is cheap: torch is imported when a
name that needs it is first used. In a job that `cluster_ddp.submit` made, the import also starts to record the warnings
before the time limit (USR1, USR2).
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from cluster_ddp._version import __version__
from cluster_ddp.errors import (
    CheckpointError,
    ClusterDDPError,
    CommunicatorError,
    DataError,
    DeviceError,
    JobError,
    JobNotFoundError,
    NonFiniteError,
    RemoteError,
    RendezvousError,
    RunDirError,
    SandboxError,
    SlurmError,
    SpecError,
    TopologyError,
)

if TYPE_CHECKING:
    from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
    from cluster_ddp.runtime.checkpoint.restore import load_weights
    from cluster_ddp.runtime.collectives import Meter
    from cluster_ddp.runtime.console import Progress
    from cluster_ddp.runtime.data.device_dataset import ResidentSet
    from cluster_ddp.runtime.data.shard import Shard
    from cluster_ddp.runtime.data.stream import Stream
    from cluster_ddp.runtime.distributed import distributed
    from cluster_ddp.runtime.non_finite import FiniteCheck
    from cluster_ddp.runtime.run_dir.run_dir import RunDir
    from cluster_ddp.runtime.stop_signals import Stopped
    from cluster_ddp.runtime.world import World
    from cluster_ddp.slurm.topology import Topology
    from cluster_ddp.submission.job import Job
    from cluster_ddp.submission.spec import JobSpec
    from cluster_ddp.submit_api import submit, submit_array

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ClusterDDPError",
    "CommunicatorError",
    "DataError",
    "DeviceError",
    "FiniteCheck",
    "Job",
    "JobError",
    "JobNotFoundError",
    "JobSpec",
    "Meter",
    "NonFiniteError",
    "Progress",
    "RemoteError",
    "RendezvousError",
    "ResidentSet",
    "RunDir",
    "RunDirError",
    "SandboxError",
    "Shard",
    "SlurmError",
    "SpecError",
    "Stopped",
    "Stream",
    "Topology",
    "TopologyError",
    "World",
    "__version__",
    "distributed",
    "load_weights",
    "submit",
    "submit_array",
]

# The modules of the names that are imported on first use.
_MODULES = {
    "Checkpointer": "runtime.checkpoint.checkpointer",
    "FiniteCheck": "runtime.non_finite",
    "Job": "submission.job",
    "JobSpec": "submission.spec",
    "Meter": "runtime.collectives",
    "Progress": "runtime.console",
    "ResidentSet": "runtime.data.device_dataset",
    "RunDir": "runtime.run_dir.run_dir",
    "Shard": "runtime.data.shard",
    "Stopped": "runtime.stop_signals",
    "Stream": "runtime.data.stream",
    "Topology": "slurm.topology",
    "World": "runtime.world",
    "distributed": "runtime.distributed",
    "load_weights": "runtime.checkpoint.restore",
    "submit": "submit_api",
    "submit_array": "submit_api",
}

# Our batch scripts start Python with the warnings ignored: a warning that comes before the handler would end it. The
# agent keeps one until there is a handler, but looks for that every five seconds only: too late for a training of a few
# steps. Other programs rarely ignore the warnings; then the import installs no handler.
if _ignored := [one for one in ("USR1", "USR2") if signal.getsignal(signal.Signals[f"SIG{one}"]) == signal.SIG_IGN]:
    from cluster_ddp.runtime import stop_signals

    stop_signals.note_early(_ignored)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
