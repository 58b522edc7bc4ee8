"""What tells the job of a run directory from another job with the same id.

Ids are not enough: two clusters count alike, a cluster that is set up anew begins at 1 again, and process ids repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.errors import SlurmError
from cluster_ddp.run import spec_file
from cluster_ddp.run.files import read_json
from cluster_ddp.run.names import File
from cluster_ddp.slurm import commands
from cluster_ddp.slurm.job_status import JobStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """What is known of a job besides its id. Empty, or infinite, where it is not known."""

    comment: str = ""
    """On Slurm: the comment that the submission gave it, which no other job has."""
    cluster: str = ""
    """The name of its cluster (ClusterName), as a training noted it."""
    submitted_by_s: float = float("inf")
    """UNIX time by which it had been submitted."""
    host: str = ""
    """On a machine without Slurm: that machine's name."""
    process: str = ""
    """On a machine without Slurm: when its process was started; see `processes.started`."""

    def is_of(self, status: JobStatus) -> bool:
        """Whether a job that Slurm knows by its id is this one, as far as can be seen."""
        if not status.may_be(self.comment, self.submitted_by_s):
            return False
        return not self.cluster or _name_of_cluster() in ("", self.cluster)


def of(folder: Path, label: str) -> JobIdentity:
    """Return what a run directory says of a job that has run in it: the last one, or an earlier one.

    Args:
        folder: the run directory.
        label: the job's id, as squeue shows it; of an array's task, the array's will do.
    """
    if (found := spec_file.of_job(folder, label)) is not None:
        record = found[1]
        noted = {name: record["identity"].get(name, "") for name in ("comment", "host", "process")}
        return JobIdentity(submitted_by_s=record["submitted_by"], **noted)
    return JobIdentity() if (folder / File.SPEC).exists() else _of_training(folder / File.LOCK)


def _of_training(lock: Path) -> JobIdentity:
    """Of a training that no submission has started, by its lock file."""
    try:
        return JobIdentity(cluster=str(read_json(lock).get("cluster") or ""), submitted_by_s=lock.stat().st_mtime)
    except (OSError, ValueError):
        return JobIdentity()


def _name_of_cluster() -> str:
    """The name of the cluster whose commands are on the PATH; empty if it does not answer."""
    try:
        return commands.cluster_name()
    except SlurmError:
        return ""
