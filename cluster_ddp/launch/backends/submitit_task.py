"""Pickles for submitit: its runner loads one in each task, calls the function in it, and keeps the result.

submitit would requeue a job as soon as it is warned (SUBMITIT_PREEMPT_SIGNAL, USR2), whatever is not saved yet. Here
the function gets the signal, and the task ends with status 75 once all is saved; then the batch script requeues it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.contract import EXIT_STOPPED, Env, File
from cluster_ddp.errors import JobError
from cluster_ddp.files import open_own
from cluster_ddp.launch import parse_python_command, run_dirs

WARNING_S = 90
"""How long before the time limit tasks on this machine are warned (submitit's own default)."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""What leaves a command time to stop."""

STOP_SIGNALS = (*WARNINGS, signal.SIGTERM)
"""What a command gets passed on."""

_POLL_S = 0.2


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
        """Call it, under submitit's local executor in the same surroundings as under Slurm."""
        if os.environ.get("SUBMITIT_EXECUTOR") == "local":
            from cluster_ddp.slurm.topology import Topology

            os.environ.update(Topology.from_environ(os.environ).exports())
            _log_to_run_dir()
        try:
            return self.function()
        finally:
            os.umask(os.umask(0o777) | 0o022)  # submitit writes the result now: others must not be able to change it


@dataclass(frozen=True, slots=True)
class Command:
    """A function that runs a command."""

    argv: tuple[str, ...]

    def __call__(self) -> int:
        """Run it, pass `STOP_SIGNALS` on to it, and exit with its status unless that is 0.

        A warning waits until the command has a handler for it. Slurm may signal all processes of a step, so Python
        begins with warnings ignored; it would die of an early one. (A shell could never trap them then.)
        """
        waiting: list[int] = []
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: waiting.append(number))
        ignore = _ignore_warnings if parse_python_command.imports_us(self.argv) else None
        process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, preexec_fn=ignore)
        while process.poll() is None:
            for early in [number for number in waiting if number == signal.SIGTERM or _catches(process.pid, number)]:
                waiting.remove(early)
                process.send_signal(early)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        status = process.wait()
        for number in STOP_SIGNALS:  # srun ends the siblings of the first to end; this one's status shall stay its own
            signal.signal(number, signal.SIG_IGN)
        if status == EXIT_STOPPED and (word := os.environ.get(Env.STOPPED)):
            # srun tells the highest status only, which may be that of a sibling that it has ended
            os.close(open_own(Path(word), os.O_WRONLY | os.O_CREAT))
        if status != 0:
            sys.exit(status if status > 0 else 128 - status)
        return 0


def _ignore_warnings() -> None:
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt); of one that has ended, yes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def _log_to_run_dir() -> None:
    """On this machine, submitit gives a log a name of its own: continue in the one that tasks have under Slurm."""
    folder = Path(os.environ[Env.RUN_DIR])
    job, rank = os.environ["SUBMITIT_LOCAL_JOB_ID"], os.environ["SUBMITIT_LOCAL_GLOBALID"]
    descriptor = open_own(folder / File.TASK_LOG.format(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "ab", buffering=0) as log:
        for stream, ending in ((1, "out"), (2, "err")):
            submitits = folder / f"{job}_{rank}_log.{ending}"
            if submitits.exists():
                log.write(submitits.read_bytes())
                submitits.unlink()
            os.dup2(log.fileno(), stream)
