"""What runs a job: Slurm, or this machine.

Each first starts a job that waits (`hold`). Its run directory is then made, named by the job's id. Then the job may run
(`release`), or it is cancelled (`abandon`).

slurm             sbatch, scontrol, scancel
local             this machine; the agent runs the ranks there
submitit_task     the pickles that submitit's runner loads in each task
submit_env        the environment that a new job inherits
identity          what tells a job from another one with the same id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from cluster_ddp.slurm.job_status import JobStatus


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


class Scheduler(Protocol):
    """What runs jobs. The classes `Slurm` and `ThisMachine` say which errors they raise."""

    script_name: str
    """Name of the script in the run directory."""

    def hold(self, script: str, options: Sequence[str]) -> Held:
        """Start a job that waits; `options` are sbatch's."""

    def release(self, held: Held, folder: Path, begin: str) -> None:
        """Let a held job run in its run directory `folder`, not before `begin` (a time as for sbatch's --begin)."""

    def abandon(self, held: Held) -> None:
        """Cancel a job that was not released."""

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """Cancel a job in any state, but not another one with its id. `folder` is its run directory."""

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """Return the status of a job; for an array, one status per task that the scheduler tells apart."""
