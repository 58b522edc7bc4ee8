"""Pickles for submitit: its runner loads one in each task, calls the function in it, and keeps the result.

submitit would requeue a job as soon as it is warned (SUBMITIT_PREEMPT_SIGNAL, USR2), even if nothing is saved yet, and
ignore TERM. Here, the function gets the signals. The task ends with status 75 once all is saved; the agent then has
the job requeued.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.errors import JobError, SpecError
from cluster_ddp.run.ownership import refuse_others


def runner(folder_pattern: str) -> tuple[str, ...]:
    """Return the command that loads a task's pickle and runs it. %a in the folder's path stands for an array's task."""
    return (sys.executable, "-u", "-m", "submitit.core._submit", folder_pattern)


def pickled(function: Callable[[], Any]) -> bytes:
    """Pickle a function in the form that submitit's runner loads and calls in each task.

    Raises:
        SpecError: something that the function uses can't be pickled.
    """
    import cloudpickle
    from submitit.core.utils import DelayedSubmission

    try:
        return cloudpickle.dumps(DelayedSubmission(SubmittedFunction(function)), pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]
    except Exception as error:
        used = "".join(f"{name} ({type(value).__name__}): " for name, value in _unpicklable(function))
        reason = str(error).rstrip(".")
        found = f"each rank gets a copy of it, and what it uses can't be pickled: {used}{reason}."
        hint = "make that inside the function, or give the name of a file to open there"
        raise SpecError(f"Submitting the function {_innermost(function).__qualname__}:", found, hint) from error


def _innermost(function: Any) -> Any:
    """The user's function inside partial objects and our own wrappers."""
    while (inner := getattr(function, "func", None) or getattr(function, "function", None)) is not None:
        function = inner
    return function if hasattr(function, "__qualname__") else type(function)


def _unpicklable(function: Callable[[], Any]) -> Iterator[tuple[str, object]]:
    """The variables of enclosing functions, and the globals, that a function uses and that can't be pickled."""
    import cloudpickle

    try:
        used = inspect.getclosurevars(_innermost(function))
    except TypeError:  # not a Python function
        return
    for name, value in {**used.globals, **used.nonlocals}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            yield name, value


def has_results(folder: Path, label: str) -> bool:
    """Return whether any rank has written a result or an exception."""
    return any(folder.glob(f"{label}_*_result.pkl"))


def results(folder: Path, label: str, tasks: int) -> list[Any]:
    """Return what the pickled function returned on each rank of the last start, in the order of ranks.

    Args:
        folder: the run directory.
        label: the job's id, as squeue shows it.
        tasks: number of tasks; of a range of nodes, the largest.

    Raises:
        JobError: the function raised on some rank (the error has the first traceback), or a rank wrote no result.
        RunDirError: others could have written a result file.
    """
    asked, hint = f"The result of job {label}:", f"read its logs in {folder}"
    paths = [folder / f"{label}_{rank}_result.pkl" for rank in range(tasks)]
    for path in paths:
        if path.exists():
            refuse_others(path)
    found = {rank: pickle.loads(path.read_bytes()) for rank, path in enumerate(paths) if path.exists()}
    outcome, value = found.get(0, ("", None))
    ranks = value.ranks if outcome == "success" else tasks  # the last start may have had fewer
    there = [rank for rank in range(ranks) if rank in found]
    for rank in sorted(there, key=lambda rank: paths[rank].stat().st_mtime):
        outcome, value = found[rank]
        if outcome == "error":
            raise JobError(asked, f"rank {rank} failed.\n{str(value).strip()}", hint)
    for rank in range(ranks):
        if rank not in found:
            raise JobError(asked, f"rank {rank} ended without a result.", hint)
    return [found[rank][1].value for rank in range(ranks)]


class RankResult(NamedTuple):
    """What a rank leaves for `results`."""

    value: Any
    """What the function returned."""
    ranks: int
    """Number of ranks of that start."""


@dataclass(frozen=True, slots=True)
class SubmittedFunction:
    """Content of a pickle: a function to call in each task of the job."""

    function: Callable[[], Any]

    def __call__(self) -> RankResult:
        """Call the function with our handling of signals. The umask then keeps others from writing its result."""
        signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR1))  # noted since the import of this package
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return RankResult(self.function(), int(os.environ["WORLD_SIZE"]))
        finally:
            os.umask(os.umask(0o777) | 0o022)
