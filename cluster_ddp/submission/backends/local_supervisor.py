"""`python -m cluster_ddp.submission.backends.local_supervisor … RUN_DIR -- COMMAND`: a job's tasks on this machine.

The rendered job.sh starts it. It does what Slurm and the batch script do on a cluster: it starts the tasks, each with
its rank and log; ends all when one fails; warns them before the time limit; restarts them when they were stopped in
time. It writes the outcome to ended.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cluster_ddp.contract import EXIT_STOPPED, TO_RESUME, Env, File
from cluster_ddp.errors import exit_on_error
from cluster_ddp.files import atomic_write, open_own
from cluster_ddp.processes import catches
from cluster_ddp.slurm import port
from cluster_ddp.submission import run_dirs

WARNING_S = 90
"""How many seconds before the time limit the tasks get the warning, USR1."""

_NOT_FINISHED = f"""\
error: A training was stopped in time, but the command ended with status 0:
  the job is not finished, and is not restarted.
  Hint: let the command end with the training's status ({EXIT_STOPPED}), as with set -e in a shell script."""
_TOO_OFTEN = "error: stopped in time, but started again {0} times already (--max-requeues {0})."
_POLL_S = 0.05
_KILL_WAIT_S = 10.0


class Supervisor:
    """Runs the tasks of one job.

    Args:
        folder: the run directory.
        command: what each task runs.
        tasks: number of tasks.
        time_limit_s: time limit of each start, in seconds; None for no limit.
        max_requeues: how often the tasks are restarted after they were stopped in time.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], *, tasks: int, time_limit_s: int | None, max_requeues: int
    ) -> None:
        self._folder, self._command, self._count = folder, command, tasks
        self._limit_s = float("inf") if time_limit_s is None else time_limit_s
        self._max_requeues = max_requeues
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._cancelled: int | None = None
        self._has_killed = False
        signal.signal(signal.SIGTERM, self._cancel)

    def run(self) -> tuple[str, int]:
        """Run the tasks to their end; restart them if they were stopped in time.

        Returns:
            The job's state, as Slurm names it, and its exit status.

        Raises:
            OSError: a task can't be started, or its log can't be written.
        """
        restarts = 0
        while True:
            for name in (File.STOPPED, File.FAILED):
                for left in self._folder.glob(f"{name}*"):
                    left.unlink()
            marker = self._folder / f"{File.STOPPED}{restarts}"
            self._start(restarts, marker)
            state, status = self._wait()
            if state == "COMPLETED" and marker.exists():
                print(_NOT_FINISHED, file=sys.stderr, flush=True)
                return "FAILED", EXIT_STOPPED
            is_stopped = state == "FAILED" and (status == EXIT_STOPPED or marker.exists())
            if not is_stopped or self._has_killed:  # a killed task may have left processes that still write
                return state, self._first_failure(status) if state == "FAILED" and not is_stopped else status
            if restarts == self._max_requeues:
                print(_TOO_OFTEN.format(restarts), file=sys.stderr, flush=True)
                return "FAILED", EXIT_STOPPED
            restarts += 1

    def _first_failure(self, status: int) -> int:
        """Print what failed first. Returns its exit status, or `status`."""
        words, first_status = run_dirs.first_failure(self._folder)
        if words:
            status = first_status or status
            log = self._folder / File.TASK_LOG.format(words.split()[1])
            if not log.exists():  # torchrun's agent, the only task, writes one for all ranks
                log = self._folder / File.TASK_LOG.format(0)
            print(f"Failed first, with status {status}: {words}\n  Its log: {log}", file=sys.stderr, flush=True)
        return status

    def _start(self, restarts: int, marker: Path) -> None:
        """Start all tasks or none, with a secret and a port for this start."""
        shared = {
            Env.SECRET: os.urandom(32).hex(),
            Env.STOPPED: str(marker),
            Env.FAILED: str(self._folder / f"{File.FAILED}{restarts}"),
            Env.LOCAL_JOB_ID: str(os.getpid()),
            "MASTER_PORT": str(_free_port()),
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        }
        self._tasks = []
        try:
            for rank in range(self._count):
                env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._tasks.append(self._task(rank, env))
        except OSError:
            self._ended("FAILED", 1)
            raise

    def _task(self, rank: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        log = open_own(self._folder / File.TASK_LOG.format(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            return subprocess.Popen(self._command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        finally:
            os.close(log)

    def _wait(self) -> tuple[str, int]:
        """Wait until all tasks end, one fails, the time limit is reached, or the job is cancelled."""
        deadline = time.monotonic() + self._limit_s
        to_warn = list(self._tasks) if self._limit_s > WARNING_S else []
        while True:
            codes = [process.poll() for process in self._tasks]
            failed = [code for code in codes if code not in (None, 0, EXIT_STOPPED)]
            if self._cancelled is not None:
                return self._ended("CANCELLED", 128 + self._cancelled)
            if failed:
                return self._ended("FAILED", failed[0] if failed[0] > 0 else 128 - failed[0])
            if time.monotonic() > deadline:
                return self._ended("TIMEOUT", 1)
            if None not in codes:
                return ("FAILED", EXIT_STOPPED) if EXIT_STOPPED in codes else ("COMPLETED", 0)
            if to_warn and time.monotonic() > deadline - WARNING_S:
                to_warn = [process for process in to_warn if not _warned(process)]
            time.sleep(_POLL_S)

    def _ended(self, state: str, status: int) -> tuple[str, int]:
        """End the tasks that still run."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _KILL_WAIT_S
        while any(process.poll() is None for process in self._tasks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._has_killed = any(process.poll() is None for process in self._tasks)
        self._send(signal.SIGKILL)
        return state, status

    def _send(self, number: int) -> None:
        for process in self._tasks:
            process.send_signal(number)  # does nothing if it has ended

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self._cancelled = number


def _warned(process: subprocess.Popen[bytes]) -> bool:
    """Warn a task once it has a handler: without one, it would die. Returns whether no warning is needed any longer."""
    if process.poll() is None:
        if not catches(process.pid, signal.SIGUSR1):
            return False
        process.send_signal(signal.SIGUSR1)
    return True


def _free_port() -> int:
    """The job's first candidate port on which nothing listens here; the last one if all are taken."""
    for candidate in port.candidates(os.getpid()):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", candidate)) != 0:
                break
    return candidate


def main() -> int:
    """Run the tasks and write the outcome to the run directory. Returns the job's exit status."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --tasks N --max-requeues N [--time-limit-s S] RUN_DIR -- COMMAND …",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=int, required=True, metavar="N", help="number of tasks")
    parser.add_argument("--max-requeues", type=int, required=True, metavar="N", help="how often they are restarted")
    parser.add_argument("--time-limit-s", type=int, metavar="S", help="time limit of each start, in seconds")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run directory")
    at = sys.argv.index("--")  # argparse would also remove a later "--" from the command
    asked, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    supervisor = Supervisor(
        asked.run_dir,
        command,
        tasks=asked.tasks,
        time_limit_s=asked.time_limit_s,
        max_requeues=asked.max_requeues,
    )
    with exit_on_error("cluster-ddp submit"):
        state, status = supervisor.run()
    with atomic_write(asked.run_dir / File.OUTCOME) as file:
        file.write(json.dumps({"state": state, "exit_code": status}).encode() + b"\n")
    if state != "COMPLETED" and (asked.run_dir / File.CHECKPOINTS).exists():
        print(f"{TO_RESUME}{run_dirs.resume_command(asked.run_dir)}", flush=True)
    if state != "COMPLETED" and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # processes that a killed task has left behind, and this one
    return status


if __name__ == "__main__":
    sys.exit(main())
