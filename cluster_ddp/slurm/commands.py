"""The one caller of Slurm's commands (sbatch, squeue, scontrol, scancel, sinfo).

Argument lists, never a shell; a time limit on each; what the command printed to stderr is in the error.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster_ddp.errors import SlurmError

TIMEOUT_S = 60.0

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

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to the job."""
        return self.state in FINAL_STATES


def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Run a Slurm command to its end and return what it printed to stdout.

    Args:
        argv: the command and its arguments.
        env: its environment; ours by default.
        timeout_s: seconds after which it is ended.

    Raises:
        SlurmError: it isn't installed, failed, or took longer than `timeout_s`.
    """
    asked = f"Running {' '.join(argv)}:"
    try:
        done = subprocess.run(
            argv,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        hint = "run this where Slurm's commands are, on a login node say, or try: python -m cluster_ddp.sandbox up"
        raise SlurmError(asked, f"there is no {argv[0]} on the PATH.", hint) from error
    except subprocess.TimeoutExpired as error:
        hint = "is the controller up? Ask it with: scontrol ping"
        raise SlurmError(asked, f"no answer within {timeout_s:g} s.", hint) from error
    if done.returncode != 0:
        found = done.stderr.strip() or f"exit status {done.returncode}, without a word."
        raise SlurmError(asked, found, f"try it by hand; its options: {argv[0]} --help")
    return done.stdout


def available(env: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm's commands are here and a controller answers them."""
    try:
        run(["sinfo", "--noheader"], env=env, timeout_s=10)
    except SlurmError:
        return False
    return True


def submit(
    script: str | os.PathLike[str],
    *,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> int:
    """Submit a batch script.

    Args:
        script: path of the script.
        options: for sbatch, before the script.
        arguments: for the script.
        env: the environment of sbatch, which the job inherits.

    Returns:
        The job id; for an array that of the whole array.

    Raises:
        SlurmError: sbatch refused, in its words.
    """
    answer = run(["sbatch", "--parsable", *options, os.fspath(script), *arguments], env=env)
    return int(answer.strip().split(";")[0])  # "id" or, in a federation, "id;cluster"


def job_statuses(job_id: int, *, env: Mapping[str, str] | None = None) -> list[JobStatus]:
    """The job's status; for an array one status per task that the controller tells apart.

    Raises:
        SlurmError: the controller doesn't know the job (any more) or doesn't answer.
    """
    records = run(["scontrol", "--oneliner", "show", "job", str(job_id)], env=env).splitlines()
    return [_status(record) for record in records if record.strip()]


def _status(record: str) -> JobStatus:
    # Values may hold blanks, so a value ends where the next " Key=" begins.
    fields = dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(.*?)(?=\s+[A-Za-z:/]+=|\s*$)", record))
    exit_code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return JobStatus(
        job_id=int(fields["JobId"]),
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        exit_code=int(exit_code),
        signal=int(signal or 0),
        stdout=fields.get("StdOut", ""),
    )
