"""Who runs a job: Slurm, or this machine.

Each starts a job that waits, so that its run directory can be made under its id before anything of it runs, and then
lets it go (`hold`, then `release` or `abandon`).

slurm             sbatch, scontrol, scancel
local             this machine; `local_supervisor` runs the tasks there
submitit_task     the pickles that submitit's runner loads in each task
submit_env        the environment that a new job inherits
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster_ddp.slurm.job_status import JobStatus


class Held(NamedTuple):
    """A job that waits to be released."""

    label: str
    """The job's id; of an array the whole array's."""
    cluster: str | None = None
    """Which cluster has it, where there are several."""
    process: Any = None
    """On this machine: the process that waits."""


class Scheduler(Protocol):
    """What runs jobs."""

    script_name: str
    """Under which name the run directory keeps the script."""

    def hold(self, script: str, options: Sequence[str]) -> Held:
        """Start a job that waits."""

    def release(self, held: Held, folder: Path, begin: str) -> None:
        """Let a job go, whose run directory is there now, from a time on (sbatch's --begin)."""

    def abandon(self, held: Held) -> None:
        """Take back a job that was not released."""

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """End a job, whatever its state."""

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """What is known of a job; of an array one per task that is told apart."""
