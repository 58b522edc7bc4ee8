"""State and progress of runs: what Slurm says of each job, and the last figures in its run directory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster_ddp.agent import first_failure
from cluster_ddp.errors import JobError, RunDirError, SlurmError
from cluster_ddp.jobs import find_runs, run_state
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.run import journal, outcome
from cluster_ddp.run.files import problem, tail
from cluster_ddp.run.names import RESTART, File, Then
from cluster_ddp.slurm import reasons
from cluster_ddp.slurm.job_status import JobStatus, all_jobs, remembered_jobs
from cluster_ddp.submission.backends import held_status, job_identity
from cluster_ddp.submission.backends.slurm import Slurm, due_job

# By cluster and job id: the job, or its array tasks by name.
_Known = dict[tuple[str | None, str], dict[str, JobStatus]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """State and progress of one job or array task. None stands for what isn't known (yet)."""

    job: str
    """Its id, as squeue shows it; empty outside a job."""
    name: str
    """Name of the job; "-" without a run directory."""
    values: Mapping[str, str] = field(default_factory=dict)
    """An array task's values of the grid."""
    state: str
    """As squeue names it. If Slurm has forgotten the job or does not answer: how the training ended by its own records,
    with STOPPED for stopped in time; "unknown" if they don't say."""
    reason: str | None = None
    """Why it waits, if it is PENDING."""
    elapsed: str | None = None
    """Time since its last start, as D-HH:MM:SS or HH:MM:SS."""
    restarts: int | None = None
    """How often it was started again in its allocation, after failures."""
    requeues: int | None = None
    """How often it was started again by a requeue, as Slurm counts."""
    nodes: int | None = None
    """Number of nodes of its last start, if a training has noted it."""
    ranks: int | None = None
    """Number of ranks of its last start, if a training has noted it."""
    node_range: str | None = None
    """Of a job that takes what is free, the numbers of nodes that it asked for: 2-8."""
    epoch: int | None = None
    """Epoch of the last record."""
    progress: float | None = None
    """The part of the training that is done, 0 to 1, if its length is known."""
    loss: float | None = None
    """Loss of the last record that has one."""
    accuracy: float | None = None
    """Accuracy of the last evaluation on the test set: 0 to 1."""
    samples_per_s: float | None = None
    """Training samples per second, over all ranks, in the last training record."""
    saved_step: int | None = None
    """Step of the newest checkpoint."""
    non_finite_step: int | None = None
    """Step at which its weights had become NaN or Inf: nothing was saved from there on."""
    run_dir: Path | None = None
    """Its run directory; None if it has none in `runs_dir`."""
    failure: str | None = None
    """Which rank failed first, and why."""
    end: str | None = None
    """What Slurm's words for its end mean, if no rank said what failed."""
    full_disk: str | None = None
    """What it can't write, and until when it waits for that, if it still runs."""
    is_submitted: bool = False
    """Whether a submission made its run directory."""
    problem: str | None = None
    """Why its run directory can't be read."""
    earlier: str | None = None
    """The id of an earlier job in its run directory, if that was asked for: it was resumed as `job`."""


def run_statuses(runs_dir: Path, asked: Sequence[str]) -> list[RunStatus]:
    """Look up the state and progress of runs: of submitted jobs, and of trainings that were started in other ways.

    They are `asked` for by job id (12; 12_3; the id of an array means its tasks) or run directory; without any, all of
    the folder `runs_dir`. They come in the order asked; tasks of an array, and all runs, in the order of submission.

    Raises:
        JobError: a job has no run directory in `runs_dir`, and Slurm does not know it.
        RunDirError: a folder that was asked for is no run directory, or its spec.json can't be read.
    """
    runs_in = functools.cache(find_runs.in_folder)
    chosen = {word: find_runs.find(word, runs_dir, runs_in) for word in asked} or {"": runs_in(runs_dir)}
    resumed = {word: find_runs.resumed(word, runs_dir) for word, runs in chosen.items() if word and not runs}
    chosen |= {word: [one] for word, one in resumed.items() if one is not None}
    of_records = iter(statuses_of([one for runs in chosen.values() for one in runs]))
    found: dict[Path | str, RunStatus] = {}  # a job on this machine may have the id of one on Slurm
    for word, runs in chosen.items():
        of_these = [replace(next(of_records), earlier=word if word in resumed else None) for _ in runs]
        if word and not of_these:
            of_these = _without_folder(word, runs_dir)
        found |= {one.run_dir or one.job: one for one in of_these}
    return list(found.values())


def statuses_of(records: Sequence[RunRecord]) -> list[RunStatus]:
    """Look up the state and progress of runs whose directories are read already."""
    known = _known(one for one in records if one.runs_on == "Slurm")
    return [_run_status(one, known) for one in records]


def _run_status(record: RunRecord, known: _Known) -> RunStatus:
    run_dir = record.run_dir
    if record.problem:
        return RunStatus(job="", name=record.name, state="unknown", run_dir=run_dir, problem=record.problem)
    status, is_locked = _status(record, known), record.is_locked()
    if status is not None:
        of_job = _of(status)
    else:
        of_job = {"state": run_state.how_ended(run_dir, record.job) or ("RUNNING" if is_locked else "unknown")}
    restarts = sum(one.then == Then.RESTART for one in journal.failures(run_dir))
    failure = _failure(record, of_job["state"], restarts + (of_job.get("requeues") or 0))
    is_alive = of_job["state"] == "RUNNING" or is_locked  # by its records, one that still writes has ended
    return RunStatus(
        job=record.job if status is None or not status.link else str(status.job_id),
        name=record.name,
        values=record.values,
        restarts=restarts,
        node_range=record.node_range or None,
        saved_step=run_state.saved_step(run_dir),
        non_finite_step=run_state.non_finite_step(run_dir),
        run_dir=run_dir,
        failure=failure or None,
        full_disk=run_state.full_disk(run_dir) if is_alive else None,
        is_submitted=record.is_submitted,
        problem=problem(run_dir / File.METRICS) or None,
        **(of_job | ({"end": None} if failure else {})),
        **run_state.last_size(run_dir),
        **run_state.figures(run_dir),
    )


def _failure(record: RunRecord, state: str, starts: int) -> str:
    """What failed first, as its rank or else Slurm says.

    The record of its last start tells, before which there were so many `starts`. While the job waits to be started
    again, it is that of the start before.
    """
    ended, first = journal.last_end(record.run_dir, record.job), ""
    if ended is not None and state != "RUNNING":
        is_older = ended.starts_again or ended.start < starts
        first = "" if is_older and state != "PENDING" else ended.failure
    if state == "NODE_FAIL" and "(node failure)" not in first:
        said = tail(record.run_dir / File.JOB_LOG).rpartition(f"\n{RESTART}")[2]
        lost = outcome.in_words(first_failure.lost_nodes(said)) or reasons.of_end(state, "", 0)
        return lost if not first or first.endswith("SIGTERM") else f"{first}; {lost}"
    if state == "OUT_OF_MEMORY" and "for memory" not in first:
        return f"{first}; {reasons.of_end(state, '', 0)}".removeprefix("; ")
    return first


def _of(status: JobStatus) -> dict[str, Any]:
    """What the scheduler says, as fields of a `RunStatus`."""
    has_failed = status.ended and status.state != "COMPLETED"
    return {
        "state": status.state,
        "reason": status.reason if status.state == "PENDING" and status.reason != "None" else None,
        "elapsed": status.elapsed or None,
        "requeues": status.restarts,
        "end": (reasons.of_end(status.state, status.reason, status.signal) or None) if has_failed else None,
    }


def _known(records: Iterable[RunRecord]) -> _Known:
    """What Slurm says of jobs. Two commands for each cluster: squeue, and sacct for jobs not in the queue."""
    jobs: dict[str | None, set[str]] = {}
    for record in records:
        jobs.setdefault(record.cluster, set()).add(record.job_id)
    known: _Known = {}
    for cluster, asked in jobs.items():
        try:
            found = all_jobs(cluster=cluster)
        except SlurmError:
            found = {}
        found |= remembered_jobs(sorted(asked - found.keys()), cluster=cluster)
        known |= {(cluster, job): {one.array_task or "": one for one in found[job]} for job in asked & found.keys()}
    return known


def _status(record: RunRecord, known: _Known) -> JobStatus | None:
    """The status that the scheduler knows, if any."""
    if record.runs_on == "this machine":
        try:
            return record.scheduler.statuses(record.job, None, record.run_dir)[0]
        except (OSError, RunDirError):
            return None
    tasks = known.get((record.cluster, record.job_id), {})
    if record.is_chain:
        return due_job(record.run_dir, record.job, tasks.values())
    found = held_status.of_number(tasks, (record.holder or record.job).partition("_")[2])
    if found is None or not job_identity.of(record.run_dir, record.job).is_of(found):
        return None
    return held_status.of_task(record.run_dir, record.job, found) if record.holder else found


def _without_folder(word: str, runs_dir: Path) -> list[RunStatus]:
    try:
        statuses = Slurm().statuses(word, None, runs_dir)
    except SlurmError as error:
        found = f"no run directory found in {runs_dir}. Slurm says: {error.found}"
        hint = "give a job id or a run directory; look in another folder with --runs-dir PATH"
        raise JobError(f"Job {word}:", found, hint) from error
    whole = word.partition("_")[0]
    jobs = {f"{whole}_{one.array_task}" if one.array_task else word: one for one in statuses}
    return [RunStatus(job=job, name="-", **_of(one)) for job, one in jobs.items()]
