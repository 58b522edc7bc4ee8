"""All jobs of a cluster in one request; `job_status.job_statuses` makes one request per job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import accumulate

from cluster_ddp.slurm import commands
from cluster_ddp.slurm.job_status import JobStatus

# squeue's columns and their widths. None has text of the user; a reason may contain spaces.
_QUEUE = {"ArrayJobID": 12, "ArrayTaskID": 64, "State": 20, "RestartCnt": 10, "TimeUsed": 20, "Reason": 200}


def all_jobs(*, cluster: str | None = None, env: Mapping[str, str] | None = None) -> dict[str, list[JobStatus]]:
    """Return all jobs that the controller knows, by job id; array tasks are listed under the id of their array.

    Exit codes and signals are 0, output files empty and start times None: squeue is not asked for them.

    Args:
        cluster: its name; None for the default one.
        env: the environment of squeue; default: this process's.

    Raises:
        SlurmError: squeue failed or did not answer.
    """
    columns = ",".join(f"{name}:{width}" for name, width in _QUEUE.items())
    command = ["squeue", *commands.on(cluster), "--all", "--noheader", "--states=all", f"--Format={columns}"]
    # SQUEUE_USERS and others would hide jobs.
    unfiltered = {name: value for name, value in (env or os.environ).items() if not name.startswith("SQUEUE_")}
    ends = list(accumulate(_QUEUE.values()))
    jobs: dict[str, list[JobStatus]] = {}
    for line in commands.run(command, env=unfiltered).splitlines():
        job, task, state, restarts, elapsed, reason = (line[i:j].strip() for i, j in zip([0, *ends], ends))
        if job.isdigit():  # else a heading with the name of the cluster
            status = JobStatus(
                job_id=int(job),
                state=state,
                reason=reason,
                exit_code=0,
                signal=0,
                stdout="",
                array_task=None if task == "N/A" else task,
                restarts=int(restarts),
                elapsed=_padded(elapsed),
            )
            jobs.setdefault(job, []).append(status)
    return jobs


def _padded(elapsed: str) -> str:
    """Write squeue's 1:30 as scontrol and sacct do: 00:01:30."""
    days, dash, clock = elapsed.rpartition("-")
    parts = [part.zfill(2) for part in clock.split(":")]
    return days + dash + ":".join(["00"] * (3 - len(parts)) + parts)
