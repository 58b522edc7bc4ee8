"""The status of jobs, from Slurm's controller or, for jobs that it has forgotten, from the accounting."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import Any

from cluster_ddp.errors import JobNotFoundError, SlurmError
from cluster_ddp.slurm.commands import on, run

# How many job ids fit into one argument of a command.
_LABELS_AT_ONCE = 1000

OUR_COMMENTS = "cluster_ddp-"
"""The comments that submissions give to jobs begin so; 16 hexadecimal digits follow, others for each job."""
# Clocks of login nodes, compute nodes and the controller differ by less.
_CLOCKS_S = 5.0

# squeue's columns and their widths. A reason may contain spaces. The last one has text of the user.
_QUEUE = {"ArrayJobID": 12, "ArrayTaskID": 64, "State": 20, "RestartCnt": 10, "TimeUsed": 20, "Reason": 200}
_QUEUE |= {"exit_code": 12, "SubmitTime": 20, "Comment": len(OUR_COMMENTS) + 16}

# Final job states (squeue(1), JOB STATE CODES).
FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
# What sacct --duplicates shows of an earlier start.
_STARTED_AGAIN = ("REQUEUED", "PREEMPTED", "NODE_FAIL")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """The status of one job or array task, as `scontrol show job` reports it. sacct and squeue report less."""

    job_id: int
    """SLURM_JOB_ID: each array task has its own."""
    state: str
    """As in squeue's long form: PENDING, RUNNING, COMPLETED …"""
    reason: str = "None"
    """Why it is pending or failed; "None" without a reason, or from sacct."""
    exit_code: int
    """Exit code of the batch script; 0 before its end."""
    signal: int
    """Signal that ended the batch script, else 0."""
    stdout: str = ""
    """Path of the job's output file; empty from sacct or squeue."""
    array_task: str | None = None
    """Of an array: the task, or the tasks that are still pending together ("3-7%4")."""
    restarts: int = 0
    """How often it was restarted."""
    elapsed: str = ""
    """Run time since its last start, as D-HH:MM:SS or HH:MM:SS."""
    expected_start: str | None = None
    """Planned or actual start (local time of the cluster); None if unknown, or from sacct or squeue."""
    submitted_s: float | None = None
    """UNIX time at which it was submitted, or last requeued (22.05 to 26.05); None if unknown."""
    link: int | None = None
    """Of a chain of jobs (`submit --chain`): its number in it; None outside a chain."""
    comment: str = ""
    """Its comment, of squeue's the beginning; empty if it has none, or from sacct."""

    @property
    def ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in FINAL_STATES

    def may_be(self, comment: str, submitted_by_s: float) -> bool:
        """Whether it can be the job that is meant, and not another one with its id.

        Args:
            comment: what the job's submission gave it; empty if that is not known.
            submitted_by_s: UNIX time by which the job had been submitted.
        """
        ours = re.match(OUR_COMMENTS + "[0-9a-f]{16}", self.comment)  # a site may add to it
        if comment and ours:
            return ours[0] == comment
        # A site may change comments, and sacct has none. Then only a job that was submitted later is surely another.
        is_later = self.submitted_s is not None and self.submitted_s > submitted_by_s + _CLOCKS_S
        return not is_later or self.restarts > 0


def job_statuses(
    label: int | str, *, cluster: str | None = None, env: Mapping[str, str] | None = None
) -> list[JobStatus]:
    """Return the status of a job; for an array, one status per task that Slurm lists separately.

    Args:
        label: the job as squeue shows it: 12, or 12_3 for an array task.
        cluster: its cluster; None for the default one.
        env: the environment of Slurm's commands; default: this process's.

    Raises:
        JobNotFoundError: neither the controller nor the accounting knows the job.
        SlurmError: scontrol failed or did not answer.
    """
    command = ["scontrol", *on(cluster), "--oneliner", "show", "job", str(label)]
    job = str(label).partition("_")[0]
    try:
        text = run(command, env=_asking(env))
    except JobNotFoundError:
        if remembered := remembered_jobs([str(label)], cluster=cluster, env=env):
            return remembered[job]
        raise
    return [_status(record) for record in _records(text, job)]


def all_jobs(*, cluster: str | None = None, env: Mapping[str, str] | None = None) -> dict[str, list[JobStatus]]:
    """Return all jobs that the controller knows, by job id; array tasks are listed under the id of their array.

    Arguments and errors are those of `job_statuses`. squeue is not asked for output files and start times.
    """
    columns = ",".join(f"{name}:{width}" for name, width in _QUEUE.items())
    command = ["squeue", *on(cluster), "--all", "--noheader", "--states=all", f"--Format={columns}"]
    ends = list(accumulate(_QUEUE.values()))
    jobs: dict[str, list[JobStatus]] = {}
    for line in run(command, env=_asking(env)).split("\n"):
        cells = [line[i:j].strip() for i, j in zip([0, *ends], ends)]
        job, task, state, restarts, elapsed, reason, waited, submitted, comment = cells
        # Else a heading with the name of the cluster, or the rest of a comment with line breaks.
        if job.isdigit() and restarts.isdigit():
            status = _read(
                *(job, waited, submitted, comment),
                state=state,
                reason=reason,
                array_task=None if task == "N/A" else task,
                restarts=int(restarts),
                elapsed=_padded(elapsed),
            )
            jobs.setdefault(job, []).append(status)
    return jobs


def _read(job_id: str, exit_status: str, submitted: str, comment: str = "", **others: Any) -> JobStatus:
    """Return a status, made from Slurm's texts."""
    (exit_code, signal), comment = _exit_status(exit_status), "" if comment == "(null)" else comment
    if not re.fullmatch(r"(\d+-)?\d\d:\d\d:\d\d", others["elapsed"], re.ASCII):
        others["elapsed"] = ""  # INVALID where a clock was set back
    others |= {"exit_code": exit_code, "signal": signal, "submitted_s": _unix_s(submitted), "comment": comment}
    return JobStatus(job_id=int(job_id), **others)


def _asking(env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a command whose answer is read: SQUEUE_USERS and others would hide jobs."""
    kept = {name: value for name, value in (env or os.environ).items() if not name.startswith("SQUEUE_")}
    return {**kept, "SLURM_TIME_FORMAT": "standard"}


def _unix_s(time: str) -> float | None:
    """A time as Slurm writes it, in the local time zone, as UNIX time; None if it is "Unknown" or "N/A"."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def _exit_status(text: str) -> tuple[int, int]:
    """Exit code and signal, as squeue shows them: a status of wait(2) as a number (22.05), or CODE:SIGNAL (26.05)."""
    if match := re.fullmatch(r"(\d+):(\d+)", text, re.ASCII):
        return int(match[1]), int(match[2])
    waited = int(text) if text.isdigit() else 0
    return waited >> 8 & 0xFF, waited & 0x7F


def _padded(elapsed: str) -> str:
    """Write squeue's 1:30 as scontrol and sacct do: 00:01:30."""
    days, dash, clock = elapsed.rpartition("-")
    parts = [part.zfill(2) for part in clock.split(":")]
    return days + dash + ":".join(["00"] * (3 - len(parts)) + parts)


def _records(text: str, job: str) -> list[str]:
    """Split the output of `scontrol --oneliner show job` into the records of the job or its array tasks.

    A comment, a name or a command may contain line breaks (22.05 to 26.11), and text that looks like a record.
    """
    begins: dict[str, int] = {}
    start = rf"^JobId=({job}|\d+(?= (?:Array|Het)JobId={job} )) "
    for match in re.finditer(start, text, flags=re.MULTILINE):
        begins.setdefault(match[1], match.start())
    ends = [*begins.values(), len(text)][1:]
    return [text[begin:end] for begin, end in zip(begins.values(), ends)]


def remembered_jobs(
    labels: Sequence[str], *, cluster: str | None = None, env: Mapping[str, str] | None = None
) -> dict[str, list[JobStatus]]:
    """Return what sacct knows of jobs that the controller has forgotten, by job id; without accounting, nothing.

    Arguments are as those of `job_statuses`.
    """
    columns = "JobIDRaw,JobID,State,ExitCode,Elapsed,Submit"
    form = ("--allocations", "--duplicates", "--parsable2", "--noheader", f"--format={columns}")
    command = ["sacct", *on(cluster), *form]
    jobs: dict[str, list[JobStatus]] = {}
    for start in range(0, len(labels), _LABELS_AT_ONCE):
        wanted = ",".join(labels[start : start + _LABELS_AT_ONCE])
        try:
            lines = run([*command, f"--jobs={wanted}"], env=_asking(env)).splitlines()
        except SlurmError:
            break
        for job_id, label, state, ended, elapsed, submitted in (x.split("|") for x in lines if x.count("|") == 5):
            job = re.split("[_+]", label)[0]  # of "12_3", an array's task, or "12+1", of a heterogeneous job
            task, state = label.partition("_")[2] or None, state.split()[0]  # "CANCELLED by 1000"
            status = _read(job_id, ended, submitted, state=state, array_task=task, elapsed=elapsed)
            _add_start(jobs.setdefault(job, []), status)
    return jobs


def _add_start(known: list[JobStatus], status: JobStatus) -> None:
    """Add a start of a job: a requeued one has a record for each of its starts."""
    before = next((one for one in known if one.job_id == status.job_id), None)
    if before is not None:
        known.remove(before)
        is_same = before.state in _STARTED_AGAIN  # else, perhaps, the same id after the cluster was set up anew
        submitted_s = before.submitted_s if is_same else status.submitted_s
        status = replace(status, restarts=before.restarts + is_same, submitted_s=submitted_s)
    known.append(status)


def elapsed_s(text: str) -> float:
    """Return a time as Slurm writes it, D-HH:MM:SS, HH:MM:SS or MM:SS, in seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, f"0:{clock}".split(":")[-3:])
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _status(record: str) -> JobStatus:
    # The user chooses the name, the comment and the command: they may contain " Key=" and line breaks. The name comes
    # before Slurm's own fields; the comment and the command come after them, but before StdOut. A value may contain
    # spaces: it ends at the next " Key=".
    slurms = re.sub(r"\sJobName=.*?(?=\sUserId=)", "", record, count=1, flags=re.DOTALL)
    pairs = re.findall(r"(?:^|\s)([A-Za-z:/]+)=(.*?)(?=\s+[A-Za-z:/]+=|\s*$)", slurms, flags=re.DOTALL)
    fields = {**dict(reversed(pairs)), "StdOut": dict(pairs).get("StdOut", "")}
    return _read(
        *(fields["JobId"], fields.get("ExitCode", "0:0"), fields.get("SubmitTime", "")),
        comment=fields.get("Comment", "").strip(),
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        stdout=fields["StdOut"],
        array_task=fields.get("ArrayTaskId"),
        restarts=int(fields.get("Restarts", "0")),
        elapsed=fields.get("RunTime", ""),
        expected_start=None if fields.get("StartTime", "Unknown") in ("Unknown", "N/A") else fields["StartTime"],
    )
