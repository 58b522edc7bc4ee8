"""A submitted job, as an object: its state, result and logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobError
from cluster_ddp.run import places
from cluster_ddp.run.files import LOG_BYTES, tail
from cluster_ddp.run.names import File
from cluster_ddp.slurm import reasons
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import Slurm

_FIRST_POLL_S, _LAST_POLL_S = 1.0, 10.0
_SILENT_S = 2.0


def poll_intervals_s() -> Iterator[float]:
    """Yield the seconds to wait between queries of a job's state: from 1 up to 10, to spare the controller."""
    interval_s = _FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(_LAST_POLL_S, interval_s * 1.1)


def describe(label: str, status: JobStatus) -> str:
    """Return the state of a job in words: why and until when it waits, after what time and how it ended."""
    if status.link:
        label = f"{label}_{status.link}"
    text = f"job {label}: {status.state}"
    if status.state == "PENDING":
        reason = "" if status.reason == "None" else f" ({reasons.of_waiting(status.reason)})"
        return text + reason + _expected_start(status)
    if status.ended:
        since = " (since its last requeue)" if status.restarts and not status.link else ""
        text += f" after {status.elapsed}{since}" if status.elapsed else ""
        return text if status.state == "COMPLETED" else f"{text}, {exit_in_words(status)}"
    return text + (f", restart {status.restarts}" if status.restarts and not status.link else "")


def _expected_start(status: JobStatus) -> str:
    """When the job is to start, to ten minutes. Nothing if that is now: Slurm says so of a job that can't start."""
    try:
        start = datetime.fromisoformat(status.expected_start or "")
    except ValueError:
        return ""
    if start < datetime.now() + timedelta(minutes=10):
        return ""
    return f", expected to start at about {start.replace(minute=start.minute // 10 * 10):%Y-%m-%d %H:%M}"


def exit_in_words(status: JobStatus) -> str:
    """Return the exit status of a job that has ended, or its signal; and what Slurm's words for such an end mean."""
    words = f"ended by signal {status.signal}" if status.signal else f"exit status {status.exit_code}"
    meaning = reasons.of_end(status.state, status.reason, status.signal)
    return f"{words}: {meaning}" if meaning else words


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, or one task of an array."""

    id: str
    """As squeue shows it: "12", or "12_3" for an array task. Of a job on this machine, a process id."""
    run_dir: Path
    """Its run directory."""
    ranks: int
    """Number of ranks; of a range of nodes, the largest."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one; else None."""
    is_function: bool = False
    """Whether it runs a function, not a command."""
    scheduler: Slurm | ThisMachine = field(repr=False)
    """What runs it: Slurm or this machine."""

    @property
    def link(self) -> Path:
        """The link with its id that leads to its run directory, runs/NAME-ID; without one, the run directory."""
        link = places.link_of(self.run_dir, self.id)
        return link if link is not None and places.leads_to(link, self.run_dir) else self.run_dir

    def status(self) -> JobStatus:
        """Return all that Slurm, or this machine, knows of the job.

        Raises:
            JobNotFoundError: Slurm has forgotten it.
            SlurmError: the controller doesn't answer.
        """
        return self.scheduler.statuses(self.id, self.cluster, self.run_dir)[0]

    def state(self) -> str:
        """Return its state as squeue names it: PENDING, RUNNING, COMPLETED, FAILED … Raises what `status` raises."""
        return self.status().state

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended, and return its status. After two seconds, say on stderr what it waits for.

        Args:
            timeout_s: seconds to wait at most; None for no limit.

        Raises:
            JobError: it has not ended after `timeout_s`.
            SlurmError: as for `status`.
        """
        intervals_s, said, since = poll_intervals_s(), "", time.monotonic()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (status := self.status()).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise JobError(
                    f"Waiting for job {self.id}:", f"still {status.state} after {timeout_s:g} s.", "raise timeout_s"
                )
            if time.monotonic() - since > _SILENT_S and (now := describe(self.id, status)) != said:
                print(f"Waiting for {now}", file=sys.stderr, flush=True)
                said = now
            time.sleep(next(intervals_s))
        return status

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the job has ended, and return its result on rank 0. Arguments and errors are as for `results`."""
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait until the job has ended, and return the results of all ranks, in their order.

        Args:
            timeout_s: seconds to wait at most; None for no limit.

        Returns:
            What the function returned on each rank of the last start. For a command, one exit status, which is 0.

        Raises:
            JobError: it failed, or has not ended after `timeout_s`, or a rank has left no result. The error has a
                function's traceback, or the last lines of the logs.
            RunDirError: others could have written a result file. It is a pickle: loading it would run code as you.
            SlurmError: as for `status`.
        """
        status = self.wait(timeout_s)
        label = str(status.job_id) if status.link else self.id
        if self.is_function and (status.state == "COMPLETED" or submitit_task.has_results(self.run_dir, label)):
            return submitit_task.results(self.run_dir, label, self.ranks)
        if status.state != "COMPLETED":
            found = f"it ended as {status.state} with exit status {status.exit_code}.\n{self._last_words()}"
            raise JobError(f"The result of job {self.id}:", found, f"read its logs in {self.run_dir}")
        return [0]

    def cancel(self) -> None:
        """Cancel the job. Raises SlurmError if scancel fails."""
        self.scheduler.cancel(self.id, self.cluster, self.run_dir)

    def logs(self) -> str:
        """Return what it has printed so far: each task, then the batch script, each under the name of its file.

        Of a longer file, the last 64 MiB.
        """
        return "".join(f"==> {path.name} <==\n{tail(path, LOG_BYTES)}" for path in self.log_files())

    def log_files(self) -> list[Path]:
        """Return the log files that exist so far. The batch script's is the last: it ends with what failed first."""
        names = [*(File.TASK_LOG.format(i) for i in range(self.ranks)), File.JOB_LOG]
        return [path for name in names if (path := self.run_dir / name).exists()]

    def _last_words(self) -> str:
        lines = [line for path in self.log_files() for line in tail(path).splitlines()]
        return "\n".join(f"    {line}" for line in lines[-10:])
