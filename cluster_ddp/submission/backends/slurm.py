"""Jobs on the cluster: sbatch, scontrol, scancel."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster_ddp.agent import chain_file
from cluster_ddp.agent.job import inherited_env
from cluster_ddp.errors import JobNotFoundError, RunDirError, SlurmError
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import Env, File
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission import run_dirs
from cluster_ddp.submission.backends import job_identity, packed_status

_TIMED_OUT = "timed out"  # "Socket timed out on send/recv operation": a busy controller may have taken the job
_OWN_COMMENT = re.compile(r"^#SBATCH --com", re.MULTILINE)  # sbatch accepts it as --comment


class Slurm:
    """The cluster whose commands are on the PATH."""

    script_name = File.BATCH_SCRIPT

    def test_only(self, script: str, options: Sequence[str]) -> str:
        """Ask the scheduler when and where the job would start (sbatch --test-only). Returns its words.

        Raises:
            SlurmError: it would refuse the job, or does not answer.
        """
        argv = ["sbatch", "--test-only", *options]
        return commands.run(argv, env=inherited_env.inherited(os.environ), text=script, words_on_stderr=True).strip()

    def new_comment(self, script: str) -> str:
        """Return a comment for the job of a script, which no other job has; empty if the script has its own."""
        return "" if _OWN_COMMENT.search(script) else job_status.OUR_COMMENTS + os.urandom(8).hex()

    def submit(self, folder: Path, options: Sequence[str], comment: str) -> JobFile:
        """Submit the script in a run directory. The job may start at once.

        Raises:
            SlurmError: sbatch refused; or it, or the controller, did not answer in time. The job is then cancelled if
                squeue shows it; the error says which.
        """
        script, env = (folder / File.BATCH_SCRIPT).read_text(), inherited_env.inherited(os.environ)
        try:
            options = [*([f"--comment={comment}"] if comment else []), *options]
            answer = commands.submit(text=script, options=options, env=env)
        except SlurmError as error:
            is_late = isinstance(error.__cause__, subprocess.TimeoutExpired) or _TIMED_OUT in error.found
            if comment and is_late:
                _end_chain(folder)
                raise _without_answer(comment, error) from error
            raise
        return JobFile(str(answer.job_id), answer.cluster, time.time())

    def abandon(self, job: JobFile, folder: Path) -> None:
        """Cancel the job, and wait until its processes have ended: its run directory is to be removed.

        Raises:
            SlurmError: the controller doesn't answer. The job then still exists, and keeps its run directory.
        """
        _end_chain(folder)
        try:
            commands.cancel([*dict.fromkeys([*reversed(chain_file.read(folder).all), job.job])], cluster=job.cluster)
        except SlurmError as error:
            raise SlurmError(
                f"Cancelling job {job.job}:", f"{error.found} It waits or runs.", f"scancel {job.job}"
            ) from error

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """Cancel the job: a single job, a whole array or one task of it.

        Raises:
            SlurmError: scancel failed: the job is unknown or another user's, or the controller doesn't answer; or the
                id is another job's now. Of a chain, a job that is not surely of this run directory is left alone.
        """
        self.statuses(label, cluster, folder)  # of an unknown job, scancel says nothing (22.05)
        jobs = [label]
        if _is_chain(folder, label):
            (folder / File.CANCELLED).touch()  # first: a job of the chain that submits the next one looks for it then
            jobs = _live_jobs(folder, cluster) if chain_file.read(folder).all else jobs
        elif "_" in label and packed_status.place(folder, label)[1]:  # a part of a job: its agent ends it
            (folder / File.CANCEL).touch()
            return
        if jobs:
            commands.run(["scancel", *commands.on(cluster), *jobs])

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """Ask the controller; if it has forgotten the job, ask the accounting. Of a chain, the job that is due counts.

        Raises:
            JobNotFoundError: neither knows the job, or the id is another job's now.
            SlurmError: the controller doesn't answer.
        """
        known = job_identity.of(folder, label)
        if label in (of_run := chain_file.read(folder)).all:
            jobs = {job: one for job in of_run.all[-2:] for one in _if_known(job, cluster)}
            if due := due_job(of_run, jobs, known):
                return [due]
        place, holder = packed_status.place(folder, label)
        of_task = holder if "_" in label else ""
        found = job_status.job_statuses(of_task or label, cluster=cluster)
        ours = [one for one in found if known.is_of(one)]
        if found and not ours:
            words = f"Slurm no longer knows it: job {label} is another job now, not that of this run directory."
            raise JobNotFoundError(f"The job of {folder}:", words, f"if you mean that one: scontrol show job {label}")
        if of_task:
            return [packed_status.of_task(place, label, ours[0])]
        if holder:
            return packed_status.of_array(folder, label, ours)
        return ours


def due_job(of_run: chain_file.Chain, jobs: Mapping[str, JobStatus], known: job_identity.Identity) -> JobStatus | None:
    """Return the job of a chain that runs or waits; else the last one that has run. None if Slurm knows neither.

    Args:
        of_run: the chain.
        jobs: what Slurm knows of its last jobs, by id.
        known: what tells them from others with the same id. They were submitted later than the first one.
    """
    known, number = replace(known, submitted_by_s=float("inf")), len(of_run.jobs) - 1
    numbers = {of_run.jobs[-1]: number, of_run.next: number + 1}
    ours = [
        replace(status, link=link, restarts=status.restarts + link)
        for job, link in numbers.items()
        if (status := jobs.get(job)) is not None and known.is_of(status)
    ]
    return next((one for one in ours if not one.ended), ours[0] if ours else None)


def _if_known(job: str, cluster: str | None) -> list[JobStatus]:
    with contextlib.suppress(JobNotFoundError):
        return job_status.job_statuses(job, cluster=cluster)
    return []


def _live_jobs(folder: Path, cluster: str | None) -> list[str]:
    """Return the jobs of a chain that run or wait, the last one first.

    Raises:
        SlurmError: one of those that the run directory names writes its output elsewhere: it is another job.
    """
    found, log = [], (folder / File.JOB_LOG).resolve()
    for job in reversed(chain_file.read(folder).all[-2:]):
        live = [one for one in _if_known(job, cluster) if not one.ended]
        if elsewhere := [one.stdout or "unknown" for one in live if Path(one.stdout).resolve() != log]:
            what = f"{File.CHAIN} names job {job}, whose output is {elsewhere[0]}: it may be another one. "
            hint = f"look at it: scontrol show job {job}; if it is the chain's: scancel {job}"
            raise SlurmError(f"Cancelling the chain of {folder}:", f"{what}No job was cancelled.", hint)
        found += [job] if live else []
    return found


def _is_chain(folder: Path, label: str) -> bool:
    """Whether a job is one of a chain: it may not have started."""
    with contextlib.suppress(RunDirError):
        record = run_dirs.read(folder)
        return bool(record["spec"].get("chain")) and label in (record["job"], *chain_file.read(folder).all)
    return False


def _end_chain(folder: Path) -> None:
    """Let a chain's job cancel the next one: it may be submitting that now, and looks for this file afterwards."""
    with contextlib.suppress(RunDirError, OSError):
        if run_dirs.read(folder)["spec"].get("chain"):
            (folder / File.CANCELLED).touch()


def _without_answer(mark: str, error: SlurmError) -> SlurmError:
    """Cancel the job that sbatch may have submitted all the same."""
    said = error.found.rstrip(".")
    if commands.cancel_by_comment(mark):
        return SlurmError(error.asked, f"{said}. It had submitted the job, which is now cancelled.", error.hint)
    found = f"{said}. squeue shows no job of it so far. If one still appears, cancel it."
    return SlurmError(error.asked, found, f"look for it later: squeue --me --format='%i %k' | grep {mark}")


def ignored_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's shell that set sbatch's options or the run directory. No job inherits them."""
    in_a_job = "SLURM_JOB_ID" in env
    return {name: value for name, value in env.items() if name.startswith(("SBATCH_", Env.RUN_DIR)) and not in_a_job}
