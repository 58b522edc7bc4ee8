"""`python -m cluster_ddp.launch.backends.local_supervisor RUN_DIR`: a job on this machine, by submitit's executor.

The rendered job.sh starts it; it starts the tasks and waits for them. To what submitit's controller does (logs, the
warning before the time limit, starting again after it) it adds what srun --kill-on-bad-exit does, and it leaves the
outcome in ended.json, since nobody else remembers it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller, LocalJobEnvironment

from cluster_ddp.contract import EXIT_STOPPED, Env, File
from cluster_ddp.files import atomic_write
from cluster_ddp.launch import run_dirs
from cluster_ddp.launch.backends import submitit_task

_POLL_S = 0.05
_KILL_WAIT_S = 10.0


class Supervisor(Controller):
    """submitit's controller, for which the first failure is the job's end, and status 75 (stopped in time) is none."""

    def __init__(self, folder: Path, max_requeues: int) -> None:
        super().__init__(folder)
        self.state, self.exit_code = "COMPLETED", 0
        self.restarts, self.max_requeues = 0, max_requeues
        signal.signal(signal.SIGTERM, self._cancel)

    def start_tasks(self) -> None:
        """Start them with a secret that no others have had."""
        os.environ[Env.SECRET] = os.urandom(32).hex()
        super().start_tasks()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """Wait for the end of all tasks, of the first that fails, of the time limit, or for a cancellation.

        Returns:
            The tasks' statuses; submitit's own for a requeue where all are to be started again.
        """
        deadline, warned = time.monotonic() + self.timeout_s, self.timeout_s <= submitit_task.WARNING_S
        while True:
            codes = [process.poll() for process in self.tasks]
            stopped = EXIT_STOPPED in codes and self.restarts < self.max_requeues
            failed = [code for code in codes if code and not (stopped and code == EXIT_STOPPED)]
            if stopped and not failed and None not in codes and self.state == "COMPLETED":
                self.restarts += 1
                os.environ["SLURM_RESTART_COUNT"] = str(self.restarts)
                return [LOCAL_REQUEUE_RETURN_CODE]
            if failed and self.state == "COMPLETED":
                self.state, self.exit_code = "FAILED", failed[0] if failed[0] > 0 else 128 - failed[0]
            elif time.monotonic() > deadline and self.state == "COMPLETED":
                self.state, self.exit_code = "TIMEOUT", 1
            if self.state != "COMPLETED":
                self._end_tasks()
            if self.state != "COMPLETED" or None not in codes:
                return codes
            if not warned and time.monotonic() > deadline - submitit_task.WARNING_S:
                warned = True
                self._forward_signal(LocalJobEnvironment._usr_sig())
            time.sleep(_POLL_S)

    def _end_tasks(self) -> None:
        self._forward_signal(signal.SIGTERM)
        deadline = time.monotonic() + _KILL_WAIT_S
        while any(process.poll() is None for process in self.tasks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._forward_signal(signal.SIGKILL)

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self.state, self.exit_code = "CANCELLED", 128 + number


def main() -> int:
    """Run the tasks, leave the outcome in the run directory. Returns the job's exit status."""
    folder = Path(sys.argv[1])
    os.environ |= {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": shlex.join(submitit_task.runner(str(folder))),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(submitit_task.WARNING_S),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }
    max_requeues = run_dirs.read(folder)["spec"]["max_requeues"]
    supervisor = Supervisor(folder, max_requeues)
    supervisor.run(max_retry=1 + max_requeues)
    outcome: dict[str, Any] = {"state": supervisor.state, "exit_code": supervisor.exit_code}
    with atomic_write(folder / File.OUTCOME) as file:
        file.write(json.dumps(outcome).encode() + b"\n")
    if supervisor.state != "COMPLETED":
        print(f"To resume: {run_dirs.resume_command(folder)}", flush=True)
    if supervisor.state != "COMPLETED" and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # what a task that had to be killed has left behind, and this process
    return supervisor.exit_code


if __name__ == "__main__":
    sys.exit(main())
