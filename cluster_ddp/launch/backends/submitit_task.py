"""Pickles for submitit: its runner loads one in each task, calls the function in it, and keeps the result.

submitit would requeue a job as soon as it is warned (SUBMITIT_PREEMPT_SIGNAL, USR2), whatever is not saved yet, and
ignore TERM. Here the function gets the signals, and the task ends with status 75 once all is saved; then the batch
script requeues it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobError
from cluster_ddp.launch import run_dirs


def runner(folder_pattern: str) -> tuple[str, ...]:
    """The command that loads a task's pickle and runs it; %j in the pattern of its folder is the job's id."""
    return (*module("submitit.core._submit"), folder_pattern)


def module(name: str) -> tuple[str, ...]:
    """The command that runs a module with the Python that is running now."""
    return (sys.executable, "-u", "-m", name)


def pickled(function: Callable[[], Any]) -> bytes:
    """The function, to be called in each task, as submitit's runner wants it."""
    import cloudpickle
    from submitit.core.utils import DelayedSubmission

    return cloudpickle.dumps(DelayedSubmission(Task(function)), pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


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
        RunDirError: others may have written one.
    """
    asked = f"The result of job {label}:"
    left = [path for rank in range(tasks) if (path := folder / f"{label}_{rank}_result.pkl").exists()]
    for path in sorted(left, key=lambda path: path.stat().st_mtime):
        run_dirs.refuse_others(path)
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
        """Call it, with our handling of signals. What submitit then writes, others must not be able to change."""
        signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR1))  # noted since the import of this package
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return self.function()
        finally:
            os.umask(os.umask(0o777) | 0o022)
