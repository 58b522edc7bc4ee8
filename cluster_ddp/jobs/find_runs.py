"""The runs of a folder, and which of them a job id or a path means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cluster_ddp.errors import JobError, RunDirError, SlurmError, printable
from cluster_ddp.jobs import run_record
from cluster_ddp.jobs.run_record import RunRecord, changed_s
from cluster_ddp.run import places, spec_file
from cluster_ddp.run.names import ASIDE, File
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.job import Job


def in_folder(runs_dir: Path) -> list[RunRecord]:
    """Return the runs of a folder, in the order of submission; no whole arrays, and none that never had a job."""
    found = []
    for path in places.each(runs_dir):
        if not run_record.is_run(path):
            continue
        try:
            found.append(run_record.read(path))
        except RunDirError as error:
            found.append(RunRecord(run_dir=path, name=places.title(path), began_s=changed_s(path), problem=error.found))
    runs = [one for one in found if not one.is_whole_array and _had_job(one)]
    return sorted(runs, key=lambda one: (one.began_s, [int(part) for part in one.job.split("_") if part]))


def _had_job(record: RunRecord) -> bool:
    """Whether a run has a job, or had one: a submission that resumes it may have been killed before it had the next."""
    if record.job or record.problem or not record.is_submitted:
        return True
    return any(record.run_dir.glob(ASIDE.format("*")))


def find(word: str, runs_dir: Path, runs_in: Callable[[Path], list[RunRecord]] = in_folder) -> list[RunRecord]:
    """Return the runs that a word means; none if it is a job without a run directory in `runs_dir`.

    Args:
        word: the path of a run directory; or a job id: 12, 12_3; of an array, each means its tasks; or a job's name.
            Several jobs may have it, those of other clusters and of this machine an id, too: then the one that has not
            ended, else the last one.
        runs_dir: folder of the run directories, in which an id or a name is looked up.
        runs_in: returns the runs of a folder.

    Raises:
        RunDirError: it is a folder, but no run directory.
        JobError: several jobs that it means have not ended; or it is no id, and no run has this name.
    """
    path = Path(word)
    if path.is_dir():
        record = run_record.read(path.parent / path.readlink() if path.is_symlink() else path)
        if not record.is_whole_array:
            return [record]
        whole = Path(word).resolve()
        return [one for one in runs_in(whole.parent) if one.job_id == record.job and one.whole.resolve() == whole]
    jobs: dict[Path, list[RunRecord]] = {}
    for one in runs_in(runs_dir):
        of_chain = [word] if one.is_chain and word.partition("_")[0] == one.job else []  # squeue shows 12_3
        if word in (one.job, one.job_id, *of_chain, one.name, places.title(one.whole)):
            jobs.setdefault(one.whole, []).append(one)
    if not jobs and not word[:1].isdigit():
        found = f"it is neither a job id nor a run directory, and no run in {runs_dir} has this name."
        raise JobError(f"Looking for the job {word}:", found, "cluster-ddp status lists all runs")
    if len(jobs) < 2:
        return [one for runs in jobs.values() for one in runs]
    unended = [
        runs for runs in jobs.values() if _has_not_ended(word if spec_file.is_label(word) else runs[0].job_id, runs[0])
    ]
    if len(unended) > 1:
        folders = " and ".join(str(runs[0].run_dir) for runs in unended)
        found = f"{len(unended)} jobs that have not ended are called so, those of {folders}."
        raise JobError(f"Job {word}:", found, f"name the run directory instead: {unended[-1][0].run_dir}")
    return (unended or list(jobs.values()))[-1]


def only(found: Sequence[RunRecord], asked: str, runs_dir: Path, command: str) -> RunRecord:
    """Return the one run that a job means, where tasks of an array don't do.

    Args:
        found: what `find` has found.
        asked, command: what it is for, and how it was asked for but for the job, for the error.
        runs_dir: where it was looked up.

    Raises:
        JobError: there is none, or it is an array.
    """
    if not found:
        hint = "give a job id or a run directory; look in another folder with --runs-dir PATH"
        raise JobError(asked, f"no run directory found in {runs_dir}.", hint)
    if len(found) > 1:
        tasks = f"it is an array with {len(found)} tasks, {found[0].job} to {found[-1].job}."
        raise JobError(asked, tasks, f"name one: {command} {found[0].job}")
    return found[0]


def newest(asked: str, runs_dir: Path) -> RunRecord:
    """Return the run that was submitted last, which is meant if no job is named; of an array, its last task.

    Args:
        asked: what it is for, for the error.
        runs_dir: folder of the run directories.

    Raises:
        JobError: there is no run.
    """
    if not (runs := in_folder(runs_dir)):
        hint = "name a job or a run directory; look in another folder with --runs-dir PATH"
        raise JobError(asked, f"no job is named, and there is no run in {runs_dir}.", hint)
    return runs[-1]


def named_or_newest(words: Sequence[str], asked: str, runs_dir: Path) -> list[str]:
    """Return the words that name jobs; if there are none, the path of the `newest` run, or of its array. It is said."""
    if words:
        return list(words)
    run = newest(asked, runs_dir)
    print(printable(f"The newest run is job {run.job_id or run.name} ({run.name})."), file=sys.stderr)
    return [str(run.whole)]


def resumed(label: str, runs_dir: Path) -> RunRecord | None:
    """Return the run of a job (12, or 12_3) that `submit --resume` has resumed as another job since, if any."""
    if not spec_file.is_label(label):
        return None
    aside = {path: changed_s(path / ASIDE.format(label)) for path in places.of_earlier(runs_dir, label)}
    runs = [one for one in in_folder(runs_dir) if one.run_dir in aside and one.job and one.is_submitted]
    return max(runs, key=lambda one: aside[one.run_dir], default=None)


def of_run(record: RunRecord, *, to_read: bool = False) -> Job:
    """Return the job of a run directory.

    Raises:
        JobError: no submission made it, or its job is not known (yet). If only its logs are read (`to_read`), those of
            `cluster-ddp launch` will do.
    """
    logs = len(list(record.run_dir.glob(File.TASK_LOG.format("*")))) if to_read and not record.is_submitted else 0
    if record.is_submitted and not record.job:
        found = "it is not known: its submission is under way, or was killed before it knew the job."
        raise JobError(f"The job of {record.run_dir}:", found, f"look for it: squeue --me --name={record.name}")
    if not (logs or (record.is_submitted and record.runs_on)):
        found = "cluster-ddp submit did not start it: its output is where its terminal or its own script wrote it."
        hint = f"read {output}" if (output := _output(record)) else "cluster-ddp submit -- COMMAND keeps the logs there"
        raise JobError(f"The job of {record.run_dir}:", found, hint)
    return Job(
        id=record.job or record.name,
        run_dir=record.run_dir,
        ranks=logs or record.ranks,
        cluster=record.cluster,
        scheduler=record.scheduler,
    )


def _output(record: RunRecord) -> str:
    """The file that a job of Slurm's prints into; empty if that is not known."""
    with suppress(SlurmError, IndexError):
        return Slurm().statuses(record.job, record.cluster, record.run_dir)[0].stdout if record.job else ""
    return ""


def _has_not_ended(label: str, record: RunRecord) -> bool:
    try:
        return not all(one.ended for one in record.scheduler.statuses(label, record.cluster, record.run_dir))
    except (SlurmError, RunDirError):  # forgotten, or not to be asked from here
        return False
