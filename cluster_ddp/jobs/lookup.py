"""Which runs a word of the command line means, and the job of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster_ddp.errors import JobError, RunDirError, SlurmError
from cluster_ddp.jobs import run_records
from cluster_ddp.jobs.run_records import RunRecord
from cluster_ddp.protocol import File
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.job import Job


def find(word: str, runs_dir: Path, runs_in: Callable[[Path], list[RunRecord]] | None = None) -> list[RunRecord]:
    """Return the runs that a word means; none if it is a job without a run directory in `runs_dir`.

    A directory means its run; that of a whole array its tasks. An id means one job, although jobs of other clusters and
    of this machine may have had the same: the one that has not ended, else the last one.

    Args:
        word: a job id (12; 12_3; the id of an array means its tasks), or the path of a run directory.
        runs_dir: folder of the run directories, in which an id is looked up.
        runs_in: returns the runs of a folder; default: `run_records.in_folder`.

    Raises:
        RunDirError: it is a folder, but no run directory.
        JobError: it is the id of several jobs that have not ended.
    """
    runs_in = runs_in or run_records.in_folder
    if Path(word).is_dir():
        record = run_records.read(Path(word))
        return _tasks(record, runs_in(Path(word).resolve().parent)) if record.is_whole_array else [record]
    jobs: dict[str, list[RunRecord]] = {}
    for one in runs_in(runs_dir):
        if word in (one.job, one.job_id):
            jobs.setdefault(_whole(one), []).append(one)
    if len(jobs) < 2:
        return [one for runs in jobs.values() for one in runs]
    unended = [runs for runs in jobs.values() if _has_not_ended(word, runs[0])]
    if len(unended) > 1:
        folders = " and ".join(str(runs[0].run_dir) for runs in unended)
        found = f"{len(unended)} jobs that have not ended have this id, those of {folders}."
        raise JobError(f"Job {word}:", found, f"name the run directory instead: {unended[-1][0].run_dir}")
    return (unended or list(jobs.values()))[-1]


def _tasks(whole: RunRecord, siblings: list[RunRecord]) -> list[RunRecord]:
    folder = whole.run_dir.resolve().name
    return [one for one in siblings if one.job_id == whole.job and _whole(one) == folder]


def _whole(record: RunRecord) -> str:
    """The name of a run directory; for an array's task, that of the whole array's."""
    _, underscore, task = record.job.partition("_")
    return record.run_dir.name.removesuffix(underscore + task)


def _has_not_ended(label: str, record: RunRecord) -> bool:
    scheduler = ThisMachine() if record.scheduler == "this machine" else Slurm()
    try:
        return not all(one.ended for one in scheduler.statuses(label, record.cluster, record.run_dir))
    except (SlurmError, RunDirError):  # forgotten, or not to be asked from here
        return False


def of_run(record: RunRecord) -> Job:
    """Return the job of a run directory.

    Raises:
        JobError: no submission made the run directory.
    """
    if record.scheduler is None or not record.is_submitted:
        found = "no submission made its run directory, so its output is where its terminal or its own script wrote it."
        output = _output(record)
        hint = f"read {output}" if output else "cluster-ddp submit -- COMMAND keeps the logs there"
        raise JobError(f"The job of {record.run_dir}:", found, hint)
    return Job(
        id=record.job,
        run_dir=record.run_dir,
        tasks=record.tasks,
        ranks=record.ranks,
        cluster=record.cluster,
        scheduler=Slurm() if record.scheduler == "Slurm" else ThisMachine(),
    )


def printed_by(record: RunRecord) -> Job:
    """Return the job of a run directory, to read its logs: those of the ranks of `cluster-ddp launch`, too.

    Raises:
        JobError: no submission made the run directory, and no rank has a log there.
    """
    logs = len(list(record.run_dir.glob(File.TASK_LOG.format("*"))))
    if record.is_submitted or not logs:
        return of_run(record)
    name = record.job or record.name
    return Job(id=name, run_dir=record.run_dir, tasks=logs, ranks=logs, scheduler=ThisMachine())


def _output(record: RunRecord) -> str:
    """The file that a job of Slurm's prints into; empty if that is not known."""
    try:
        found = Slurm().statuses(record.job, record.cluster, record.run_dir) if record.job else []
    except SlurmError:
        found = []
    return found[0].stdout if found else ""
