"""What runs a job: Slurm, or this machine.

Each first starts a job that waits (`hold`). Its run directory is then made, named by the job's id. Then the job may run
(`release`), or it is cancelled (`abandon`).

slurm             sbatch, scontrol, scancel
local             this machine; the agent runs the ranks there
submitit_task     the pickles that submitit's runner loads in each task
identity          what tells a job from another one with the same id
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Held(NamedTuple):
    """A job that waits to be released."""

    label: str
    """The job's id; for an array, that of the whole array."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one."""
    process: Any = None
    """On this machine: the waiting process, a subprocess.Popen; on Slurm None."""
    identity: Mapping[str, str] = MappingProxyType({})
    """What tells it from another job with the same id, kept in spec.json: fields of `identity.Identity`."""
