"""A submitted job, in the hands of whoever submitted it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File
from cluster_ddp.errors import JobError
from cluster_ddp.launch import submission
from cluster_ddp.launch.backends import Scheduler, submitit_task
from cluster_ddp.launch.planning import Plan
from cluster_ddp.slurm.job_status import JobStatus

_FIRST_POLL_S, _LAST_POLL_S = 1.0, 10.0


def poll_intervals_s() -> Iterator[float]:
    """How long to wait before asking for a job's state again: at first often, then sparing the controller."""
    interval_s = _FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(_LAST_POLL_S, interval_s * 1.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, or one task of an array."""

    id: str
    """As squeue shows it: "12", or "12_3" for an array's task. On this machine a process id."""
    run_dir: Path
    """Its run directory."""
    tasks: int
    """How many tasks it has: ranks, or under torchrun nodes."""
    cluster: str | None = None
    """Which cluster has it, where there are several."""
    is_function: bool = False
    """Whether a function runs in it, or a command."""
    scheduler: Scheduler = field(repr=False)
    """Who runs it."""

    def status(self) -> JobStatus:
        """All that is known of it.

        Raises:
            SlurmError: nobody knows it any more, or the controller doesn't answer.
        """
        return self.scheduler.statuses(self.id, self.cluster, self.run_dir)[0]

    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT … as squeue has it. Errors as of `status`."""
        return self.status().state

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until nothing more happens to it.

        Raises:
            JobError: it took longer than `timeout_s`.
            SlurmError: as of `status`.
        """
        intervals_s = poll_intervals_s()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (status := self.status()).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise JobError(
                    f"Waiting for job {self.id}:", f"still {status.state} after {timeout_s:g} s.", "wait longer"
                )
            time.sleep(next(intervals_s))
        return status

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for its end.

        Returns:
            What the function returned on rank 0; of a command, its exit status, which is 0.

        Raises:
            JobError: it failed; what it said last is in the error.
            RunDirError: others may have written the file that it left, which would run as you when it is loaded.
            SlurmError: as of `status`.
        """
        status = self.wait(timeout_s)
        if self.is_function and (status.state == "COMPLETED" or submitit_task.has_results(self.run_dir, self.id)):
            return submitit_task.result(self.run_dir, self.id, self.tasks)
        if status.state != "COMPLETED":
            found = f"it ended as {status.state} with exit status {status.exit_code}.\n{self._last_words()}"
            raise JobError(f"The result of job {self.id}:", found, f"its output is in {self.run_dir}")
        return 0

    def cancel(self) -> None:
        """End it. Errors as of `status`."""
        self.scheduler.cancel(self.id, self.cluster, self.run_dir)

    def logs(self) -> str:
        """All that it has printed so far: the batch script, then each task, under their files' names."""
        return "".join(f"==> {path.name} <==\n{path.read_text(errors='replace')}" for path in self.log_files())

    def log_files(self) -> list[Path]:
        """The logs that are there by now."""
        names = [File.JOB_LOG, *(File.TASK_LOG.format(i) for i in range(self.tasks))]
        return [path for name in names if (path := self.run_dir / name).exists()]

    def _last_words(self) -> str:
        lines = [line for path in self.log_files() for line in path.read_text(errors="replace").splitlines()]
        return "\n".join(f"    {line}" for line in lines[-10:])


def submit(plan: Plan) -> list[Job]:
    """Submit what was planned. Returns the job, or an array's tasks. Errors as of `submission.submit`."""
    return [Job(**task._asdict()) for task in submission.submit(plan)]
