"""Jobs on the cluster: sbatch, scontrol, scancel."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cluster_ddp.agent.job import chain, inherited_env
from cluster_ddp.errors import JobNotFoundError, RunDirError, SlurmError
from cluster_ddp.run import spec_file
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import Env, File
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends import held_status, job_identity

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
                raise _without_answer(comment, error) from error
            raise
        return JobFile(str(answer.job_id), answer.cluster, time.time())

    def abandon(self, job: JobFile, folder: Path) -> None:
        """Cancel the job, and wait until its processes have ended: its run directory is to be removed.

        Raises:
            SlurmError: the controller doesn't answer. The job then still exists, and keeps its run directory.
        """
        try:
            commands.cancel([job.job], cluster=job.cluster)
        except SlurmError as error:
            raise SlurmError(
                f"Cancelling job {job.job}:", f"{error.found} It waits or runs.", f"scancel {job.job}"
            ) from error

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """Cancel the job: a single job, a whole array or one task of it.

        Raises:
            SlurmError: scancel failed: the job is unknown or another user's, or the controller doesn't answer; or the
                id is another job's now.
        """
        self.statuses(label, cluster, folder)  # of an unknown job, scancel says nothing (22.05)
        if "_" in label and held_status.place(folder, label)[1]:  # a part of a job: its agent ends it
            (folder / File.CANCEL).touch()
            return
        commands.run(["scancel", *commands.on(cluster), label])

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """Ask the controller; if it has forgotten the job, ask the accounting. Of a chain, the job that is due counts.

        Raises:
            JobNotFoundError: neither knows the job, or the id is another job's now.
            SlurmError: the controller doesn't answer.
        """
        known = job_identity.of(folder, label)
        place, holder = held_status.place(folder, label)
        of_task = holder if "_" in label else ""
        found = job_status.job_statuses(of_task or label, cluster=cluster)
        ours = [one for one in found if known.is_of(one)]
        if found and not ours:
            words = f"Slurm no longer knows it: job {label} is another job now, not that of this run directory."
            raise JobNotFoundError(f"The job of {folder}:", words, f"if you mean that one: scontrol show job {label}")
        if of_task:
            return [held_status.of_task(place, label, ours[0])]
        if holder:
            return held_status.of_array(folder, label, ours)
        due = due_job(folder, label, ours) if _is_chain(folder, label) else None
        return [due] if due is not None else ours


def due_job(folder: Path, array: str, tasks: Iterable[JobStatus]) -> JobStatus | None:
    """Return the task of a chain that runs or waits; else the last one that has run. None if Slurm knows none of it.

    Args:
        folder: the run directory.
        array: the chain's id.
        tasks: what Slurm knows of the jobs with this id.
    """
    known = job_identity.of(folder, array)
    ours = {_number(one): one for one in tasks if known.is_of(one)}
    begun = [one.number for one in chain.links(folder, array)][-1:]
    due = [ours[number] for number in begun if number in ours]
    due = [one for one in due if not one.ended] or [one for one in ours.values() if not one.ended] or due
    due = due or [*ours.values()][-1:]
    return replace(due[0], link=_number(due[0]), restarts=_number(due[0]), array_task=None) if due else None


def _number(task: JobStatus) -> int:
    """The number of a task; of those that wait together, "3-20%1", the first one's."""
    return int((re.match(r"\d+", task.array_task or "") or [0])[0])


def _is_chain(folder: Path, label: str) -> bool:
    with contextlib.suppress(RunDirError):
        record = spec_file.read(folder)
        return bool(record["spec"].get("chain")) and label == record["job"]
    return False


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
