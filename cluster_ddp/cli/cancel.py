"""`cluster-ddp cancel JOB …`: end jobs, on Slurm or on this machine. A training that uses cluster_ddp saves first.

JOB is a job id (12, or 12_3 for an array task; an array's id means all its tasks) or a run directory.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser, jobs_parser
from cluster_ddp.errors import JobError, exit_on_error, printable
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.find_runs import of_run
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.run.names import File
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends.slurm import Slurm

PROGRAM = "cluster-ddp cancel"


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    top.add_argument("jobs", nargs="*", metavar="JOB", help="job ids or run directories")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, find the jobs, cancel each. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        if (elsewhere := run_there("cancel", argv)) is not None:
            return elsewhere
        if not arguments.jobs:
            asked = "Cancelling a job:"
            run = find_runs.newest(asked, arguments.runs_dir)
            label = run.job_id or str(run.run_dir)
            found = f"no job is named. The newest run is job {label} ({run.name})."
            raise JobError(asked, printable(found), f"{PROGRAM} {shlex.quote(label)}")
        for word in arguments.jobs:
            print(_cancel(word, arguments.runs_dir))
    return 0


def _cancel(word: str, runs_dir: Path) -> str:
    """Cancel what a word means. Returns what was done."""
    found = find_runs.find(word, runs_dir)
    if not found and Path(word).is_dir():
        raise JobError(f"Cancelling {word}:", "no job has run in it.", "give a job id or a run directory")
    if not found and (resumed := find_runs.resumed(word, runs_dir)) is not None:
        asked, said = f"Cancelling job {word}:", f"it has ended, and it was resumed as job {resumed.job}."
        raise JobError(asked, said, f"to cancel that one: {PROGRAM} {resumed.job}")
    if not found or (len(found) == 1 and found[0].job and not found[0].is_submitted):  # Slurm may know it
        job, folder = (found[0].job, found[0].run_dir) if found else (word, runs_dir)
        known = Slurm().statuses(job, None, folder)
        if known and all(one.ended for one in known):  # scancel says nothing of it (22.05)
            raise _has_ended(word, known[-1].state)
        _refuse_holder(job, known)
        Slurm().cancel(job, None, folder)
        return f"Cancelled job {job}."
    running = [job for job in map(of_run, found) if not job.status().ended]
    if not running:
        raise _has_ended(word, of_run(found[-1]).state())
    first, ids = running[0], running[0].id
    if len(running) == 1:
        first.cancel()
    else:  # one command for a whole array
        first.scheduler.cancel(found[0].job_id, first.cluster, first.run_dir)
        ids = f"{first.id} to {running[-1].id}"
    what = "task" if len(running) == 1 and found[0].holder else "job"
    return printable(f"Cancelled {what} {ids} ({found[0].name}). To see how it ends: cluster-ddp status {word}")


def _refuse_holder(job: str, known: Sequence[JobStatus]) -> None:
    """Refuse to cancel a job of Slurm's that holds several tasks: 23_0 may mean task 0 of them."""
    for log in (Path(one.stdout) for one in known if "_" in job):
        if fnmatch.fnmatch(log.name, File.HOLDER_LOG.format("*")):
            found = f"for Slurm this is a job that holds several tasks of the array, of {log.parent}_*."
            hint = f"{PROGRAM} --runs-dir {shlex.quote(str(log.parent.parent))} {job}, to cancel task {job} alone"
            raise JobError(f"Cancelling {job}:", found, f"{hint}; scancel {job}, for all tasks that the job holds")


def _has_ended(word: str, state: str) -> JobError:
    return JobError(f"Cancelling {word}:", f"it has ended already: {state}.", "cluster-ddp status shows what runs")
