"""The one caller of Slurm's commands (sbatch, squeue, scontrol, scancel, sinfo).

Argument lists, never a shell; a time limit on each; what the command printed to stderr is in the error.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster_ddp.errors import JobNotFoundError, SlurmError

TIMEOUT_S = 60.0
# So many job ids fit into one argument of a command.
_LABELS_AT_ONCE = 1000

# Job states after which nothing more happens to a job (squeue(1), JOB STATE CODES).
FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """One job (or array task) as `scontrol show job` tells it."""

    job_id: int
    """SLURM_JOB_ID: each array task has its own."""
    state: str
    """As in squeue's long form: PENDING, RUNNING, COMPLETED …"""
    reason: str
    """Why it is pending or failed; "None" where there is no reason."""
    exit_code: int
    """Of the batch script; 0 while it has not ended."""
    signal: int
    """The signal that ended the batch script, else 0."""
    stdout: str
    """Path of the job's output file."""
    array_task: str | None = None
    """Of an array: which task, or, while they wait together, which tasks ("3-7%4")."""
    restarts: int = 0
    """How often it was started again."""
    elapsed: str = ""
    """How long it has run since its last start, as D-HH:MM:SS or HH:MM:SS."""
    expected_start: str | None = None
    """When the scheduler plans to start it, or when it started (local time of the cluster)."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to the job."""
        return self.state in FINAL_STATES


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float | None = None,
    words_on_stderr: bool = False,
) -> str:
    """Run a Slurm command to its end and return what it printed to stdout.

    Args:
        argv: the command and its arguments.
        env: its environment; ours by default.
        text: what it reads from stdin; nothing by default.
        timeout_s: seconds after which it is ended; default: `TIMEOUT_S`.
        words_on_stderr: return what it printed to stderr instead, where some commands answer.

    Raises:
        SlurmError: it isn't installed, failed, or took longer than `timeout_s`.
    """
    asked, timeout_s = f"Running {' '.join(argv)}:", timeout_s or TIMEOUT_S
    try:
        done = subprocess.run(
            argv,
            env=None if env is None else dict(env),
            input=text or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            start_new_session=True,  # a terminal's Ctrl-C is ours to answer: sbatch might have done its work
        )
    except FileNotFoundError as error:
        hint = "run this where Slurm's commands are, on a login node say, or try: cluster-ddp sandbox up"
        raise SlurmError(asked, f"there is no {argv[0]} on the PATH.", hint) from error
    except subprocess.TimeoutExpired as error:
        hint = "is the controller up? Ask it with: scontrol ping"
        raise SlurmError(asked, f"no answer within {timeout_s:g} s.", hint) from error
    if done.returncode != 0:
        raise _refused(asked, argv[0], done)
    return done.stderr if words_on_stderr else done.stdout


def _refused(asked: str, program: str, done: subprocess.CompletedProcess[str]) -> SlurmError:
    found = done.stderr.strip() or f"exit status {done.returncode}, without a word."
    kind = JobNotFoundError if "Invalid job id" in found else SlurmError
    return kind(asked, found, _hint(program, found))


# What sbatch says (22.05 to 26.05) -> what mends it. The first that is found in its words counts.
_HINTS = (
    ("account/partition", "name an account that may use it: --account; see: sacctmgr show associations user=$USER"),
    ("invalid account", "name your account: --account; see: sacctmgr show associations user=$USER"),
    ("invalid partition", "name one of: sinfo -o %P"),
    ("No partition specified", "name one of: sinfo -o %P"),
    ("invalid qos", "name one of yours: --qos; see: sacctmgr show associations user=$USER format=qos"),
    ("time limit", "ask for less: --time; each partition's limit: sinfo -o '%P %l'"),
    ("generic resource", "ask for GPUs that the nodes have, by the name they have there: sinfo -o '%P %G'"),
    ("node configuration is not available", "no node has all of that at once: sinfo -o '%P %D %c %m %G %f'"),
    ("node count specification", "ask for fewer nodes; how many there are: sinfo -o '%P %D'"),
    ("memory specification", "ask for less memory; what the nodes have (MB): sinfo -o '%P %m'"),
    ("invalid job array", "the cluster allows fewer tasks: scontrol show config | grep MaxArraySize"),
    ("violates accounting", "a limit of your account or QOS; see: sacctmgr show associations user=$USER"),
    ("invalid feature", "name features that the nodes have: sinfo -o '%P %f'"),
    ("dependency", "see whether that job is still known: scontrol show job ID"),
    ("contact slurm controller", "is it up? Ask it with: scontrol ping"),
    ("Invalid job id", "jobs are forgotten some minutes after their end; where there is accounting: sacct -j ID"),
)  # fmt: skip


def _hint(program: str, words: str) -> str:
    generic = f"try it by hand; its options: {program} --help"
    return next((hint for sign, hint in _HINTS if sign.lower() in words.lower()), generic)


def available(env: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm's commands are here and a controller answers them."""
    try:
        run(["sinfo", "--noheader"], env=env, timeout_s=10)
    except SlurmError:
        return False
    return True


class Submitted(NamedTuple):
    """What sbatch answers."""

    job_id: int
    """The job; for an array the whole array."""
    cluster: str | None = None
    """Which cluster took it, where there are several (sbatch --clusters, federations)."""


def submit(
    script: str | os.PathLike[str] | None = None,
    *,
    text: str | None = None,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Submitted:
    """Submit a batch script.

    Args:
        script: path of the script; None where its `text` is given.
        text: of the script.
        options: for sbatch, before the script.
        arguments: for the script.
        env: the environment of sbatch, which the job inherits.

    Raises:
        SlurmError: sbatch refused, in its words.
    """
    where = [] if script is None else [os.fspath(script), *arguments]
    answer = run(["sbatch", "--parsable", *options, *where], env=env, text=text).split()
    match = re.fullmatch(r"(\d+)(?:;(.+))?", answer[-1] if answer else "")
    if match is None:
        found = f"instead of a job id it answered {' '.join(answer)!r}."
        raise SlurmError("Running sbatch --parsable:", found, "is sbatch another program here? See: type -a sbatch")
    return Submitted(job_id=int(match[1]), cluster=match[2])


def cancel_by_comment(comment: str) -> bool:
    """Cancel the job that sbatch may have submitted although it gave no answer in time.

    It is looked for as long again: the controller may be as slow with the job as with its answer.

    Args:
        comment: that only this job has.

    Returns:
        Whether it was found.

    Raises:
        SlurmError: it was found, and can't be cancelled.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        lines: list[str] = []
        with contextlib.suppress(SlurmError):
            lines = run(["squeue", "--me", "--noheader", "--format=%F %k"]).splitlines()
        if ids := {line.split()[0] for line in lines if line.split()[1:] == [comment]}:
            run(["scancel", *ids])
            return True
        time.sleep(1)
    return False


def job_statuses(
    label: int | str, *, cluster: str | None = None, env: Mapping[str, str] | None = None
) -> list[JobStatus]:
    """The job's status; for an array one status per task that the controller tells apart.

    Args:
        label: as squeue shows it: 12, or 12_3 for an array's task.
        cluster: where it is, if not on the default one.
        env: the environment of scontrol.

    Raises:
        JobNotFoundError: the controller doesn't know the job (any more).
        SlurmError: it doesn't answer.
    """
    command = ["scontrol", *on(cluster), "--oneliner", "show", "job", str(label)]
    job = str(label).partition("_")[0]
    try:
        text = run(command, env=env)
    except JobNotFoundError:
        if remembered := remembered_jobs([str(label)], cluster=cluster, env=env):
            return remembered[job]
        raise
    return [_status(record) for record in _records(text, job)]


def _records(text: str, job: str) -> list[str]:
    """What `scontrol --oneliner show job` prints of a job, or of each task of an array.

    A comment, a name or a command may hold line breaks (22.05 to 26.11), and words that look like a record.
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
    """What sacct remembers of jobs that the controller has forgotten, by job id; nothing where there is no accounting.

    Args:
        labels: as squeue shows them.
        cluster: where they are, if not on the default one.
        env: the environment of sacct.
    """
    columns = "JobIDRaw,JobID,State,ExitCode,Elapsed"
    command = ["sacct", *on(cluster), "--allocations", "--parsable2", "--noheader", f"--format={columns}"]
    jobs: dict[str, list[JobStatus]] = {}
    for start in range(0, len(labels), _LABELS_AT_ONCE):
        wanted = ",".join(labels[start : start + _LABELS_AT_ONCE])
        try:
            lines = run([*command, f"--jobs={wanted}"], env=env).splitlines()
        except SlurmError:
            break
        for fields in (line.split("|") for line in lines if line.count("|") == 4):
            jobs.setdefault(fields[1].partition("_")[0], []).append(_remembered(*fields))
    return jobs


def _remembered(raw_id: str, shown_id: str, state: str, exit_status: str, elapsed: str) -> JobStatus:
    exit_code, _, signal = exit_status.partition(":")
    return JobStatus(
        job_id=int(raw_id),
        state=state.split()[0],  # "CANCELLED by 1000"
        reason="None",
        exit_code=int(exit_code),
        signal=int(signal or 0),
        stdout="",
        array_task=shown_id.partition("_")[2] or None,
        elapsed=elapsed,
    )


def on(cluster: str | None) -> list[str]:
    """The option that sends a command to a cluster; none for the default one."""
    return [] if cluster is None else [f"--clusters={cluster}"]


def _status(record: str) -> JobStatus:
    # The name is the user's, and comes before what is Slurm's; the comment and the command come after it, but before
    # StdOut. Such words may hold " Key=" and line breaks. A value holds blanks: it ends where the next " Key=" begins.
    slurms = re.sub(r"\sJobName=.*?(?=\sUserId=)", "", record, count=1, flags=re.DOTALL)
    pairs = re.findall(r"(?:^|\s)([A-Za-z:/]+)=(.*?)(?=\s+[A-Za-z:/]+=|\s*$)", slurms, flags=re.DOTALL)
    fields = {**dict(reversed(pairs)), "StdOut": dict(pairs).get("StdOut", "")}
    exit_code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return JobStatus(
        job_id=int(fields["JobId"]),
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        exit_code=int(exit_code),
        signal=int(signal or 0),
        stdout=fields["StdOut"],
        array_task=fields.get("ArrayTaskId"),
        restarts=int(fields.get("Restarts", "0")),
        elapsed=fields.get("RunTime", ""),
        expected_start=None if fields.get("StartTime", "Unknown") in ("Unknown", "N/A") else fields["StartTime"],
    )
