"""Pickles for submitit: its runner loads one in each task, calls the function in it, and keeps the result.

submitit also answers its warning signal (SUBMITIT_PREEMPT_SIGNAL, USR2): it requeues the job, or an array's one task.
Before the time limit it does that only where the job wants to be requeued: a script that saves nothing would start
from nothing, again and again.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from cluster_ddp.errors import JobError

MAX_TIMEOUTS = 3
"""How often submitit may requeue a job that came to its time limit (its own default)."""

WARNING_S = 90
"""How long before the time limit submitit wants its warning (its own default)."""


def runner(folder_pattern: str) -> tuple[str, ...]:
    """The command that loads a task's pickle and runs it; %j in the pattern of its folder is the job's id."""
    return (*module("submitit.core._submit"), folder_pattern)


def module(name: str) -> tuple[str, ...]:
    """The command that runs a module with the Python that is running now."""
    return (sys.executable, "-u", "-m", name)


def pickled(function: Callable[[], Any], *, time_limit_min: int, requeue: bool) -> bytes:
    """The function as submitit's runner wants it.

    Args:
        function: to be called in each task.
        time_limit_min: of the job; 0 where it isn't known.
        requeue: start again at the time limit.
    """
    import cloudpickle
    from submitit.core.utils import DelayedSubmission

    submission = DelayedSubmission((RequeuedTask if requeue else Task)(function))
    submission.set_timeout(time_limit_min, MAX_TIMEOUTS)
    return cloudpickle.dumps(submission, pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


def pickle_name(label: str) -> str:
    """The name of the file in which submitit's runner looks for it."""
    return f"{label}_submitted.pkl"


def has_results(folder: Path, label: str) -> bool:
    """Whether any rank has left a result, or an exception."""
    return any(folder.glob(f"{label}_*_result.pkl"))


def result(folder: Path, label: str, tasks: int) -> Any:
    """What the pickled function returned on rank 0.

    Raises:
        JobError: it raised on some rank (the traceback of the first is in the error), or rank 0 left nothing.
    """
    asked = f"The result of job {label}:"
    left = [path for rank in range(tasks) if (path := folder / f"{label}_{rank}_result.pkl").exists()]
    for path in sorted(left, key=lambda path: path.stat().st_mtime):
        outcome, value = pickle.loads(path.read_bytes())
        if outcome == "error":
            rank = path.name.split("_")[-2]
            raise JobError(asked, f"rank {rank} failed.\n{str(value).strip()}", f"its output is in {folder}")
    path = folder / f"{label}_0_result.pkl"
    if path not in left:
        raise JobError(asked, "rank 0 ended without one.", f"its output is in {folder}")
    return pickle.loads(path.read_bytes())[1]


@dataclass(frozen=True, slots=True)
class Task:
    """What a pickle holds: a function, to be called in each task of the job."""

    function: Callable[[], Any]

    def __call__(self) -> Any:
        """Call it, under submitit's local executor in the same surroundings as under Slurm."""
        if os.environ.get("SUBMITIT_EXECUTOR") == "local":
            from cluster_ddp.slurm.environment import Topology

            os.environ.update(Topology.from_environ(os.environ).exports())
            _log_to_run_folder()
        return self.function()


class RequeuedTask(Task):
    """A task that submitit starts again when it is warned of its end."""

    __slots__ = ()

    def checkpoint(self) -> Any:
        """What to run then: the same again, which goes on from what it has saved in its run folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True, slots=True)
class Command:
    """A function that runs a command."""

    argv: tuple[str, ...]

    def __call__(self) -> int:
        """Run it, pass TERM on to it, and exit with its status unless that is 0."""
        # The warning signal reaches all processes of a task. A command that doesn't know it must not die of it.
        warning = signal.Signals[f"SIG{warning_signal()}"]
        before = signal.signal(warning, signal.SIG_IGN)
        process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL)
        signal.signal(warning, before)

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        status = process.wait()
        if status != 0:
            sys.exit(status if status > 0 else 128 - status)
        return 0


def warning_signal() -> str:
    """submitit's warning, without "SIG"."""
    return os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")


def _log_to_run_folder() -> None:
    """On this machine, submitit gives a log a name of its own: go on in the one that tasks have under Slurm."""
    folder = Path(os.environ["CLUSTER_DDP_RUN_DIR"])
    job, rank = os.environ["SUBMITIT_LOCAL_JOB_ID"], os.environ["SUBMITIT_LOCAL_GLOBALID"]
    with open(folder / f"task-{rank}.log", "ab", buffering=0) as log:
        for descriptor, ending in ((1, "out"), (2, "err")):
            submitits = folder / f"{job}_{rank}_log.{ending}"
            if submitits.exists():
                log.write(submitits.read_bytes())
                submitits.unlink()
            os.dup2(log.fileno(), descriptor)
