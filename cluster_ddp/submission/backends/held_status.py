"""The status of a task that another job holds. Slurm knows that job; the task's run directory says the rest."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_ddp.run import journal, places, spec_file, turns
from cluster_ddp.run.names import File
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.validation import slurms_time


def place(folder: Path, label: str) -> tuple[Path, str]:
    """Return where the files of a task are, and the label of the job that holds it.

    Args:
        folder: its run directory. If it was resumed since, its files are in a folder there.
        label: the task's label; or that of its array, for any of its tasks.

    Returns:
        `folder` and "" if no other job holds it.
    """
    found = spec_file.of_job(folder, label)
    return (folder, "") if found is None else (found[0], spec_file.holder(found[1]))


def of_array(folder: Path, label: str, jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Return the status of each task of an array, in the order of their numbers.

    Args:
        folder: the run directory of one.
        label: of the array.
        jobs: of all jobs that hold its tasks.
    """
    found, named = dict[int, JobStatus](), {one.array_task or "": one for one in jobs}
    for path in places.tasks(folder.parent):
        where, job = place(path, f"{label}_{path.name}")
        if job and (status := of_number(named, job.partition("_")[2])) is not None:
            found[int(path.name)] = of_task(where, f"{label}_{path.name}", status)
    return [found[number] for number in sorted(found)]


def of_number(named: Mapping[str, JobStatus], number: str) -> JobStatus | None:
    """Return the status of an array's job, of all by name. Those that wait share one, with a name such as "3-7%4"."""
    return named.get(number) or next((one for name, one in named.items() if name and not name.isdigit()), None)


def of_task(place: Path, label: str, job: JobStatus) -> JobStatus:
    """Return the status of a task.

    Args:
        place: where its files are.
        label: its own.
        job: the status of the job that holds it.
    """
    turn, ended = turns.last(place, label), journal.last_end(place, label)
    known = {"array_task": label.partition("_")[2], "restarts": max(0, turn.starts - 1), "elapsed": ""}
    task = dataclasses.replace(job, exit_code=0, signal=0, reason="None", **known)  # type: ignore[arg-type]
    if ended is not None and not ended.starts_again:
        state = "FAILED" if ended.state == "STOPPED" else ended.state
        took_s = ended.time - turn.time if turn.starts else 0.0
        return dataclasses.replace(task, state=state, exit_code=ended.status, elapsed=_elapsed(took_s))
    has_begun = turn.starts > 0 and turn.requeues == job.restarts and not turn.is_stopped(ended)
    if os.path.lexists(place / File.CANCEL) and not (has_begun and not job.ended):
        return dataclasses.replace(task, state="CANCELLED", exit_code=143)
    if job.ended or job.state == "PENDING":
        return dataclasses.replace(job, **known)  # type: ignore[arg-type]
    if has_begun:
        return dataclasses.replace(task, state=job.state, elapsed=_elapsed(time.time() - turn.time))
    return dataclasses.replace(
        task, state="PENDING", reason=f"its turn in Slurm's job {label.partition('_')[0]}_{job.array_task}"
    )


def _elapsed(seconds: float) -> str:
    return slurms_time(max(0, round(seconds))).removeprefix("0-")
