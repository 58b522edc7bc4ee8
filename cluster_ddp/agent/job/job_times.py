"""When a job started and when it will end, for its rank 0, which stops in time; that may change while the job runs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.job import slurm_commands
from cluster_ddp.protocol import Env
from cluster_ddp.slurm.variables import Variables

RETRY_S = 5.0
"""Seconds between two questions: a busy controller may not answer at once."""

_ASK_S = 60.0


@contextlib.contextmanager
def times_noted(label: str, env: dict[str, str], path: Path, limit_s: int | None = None) -> Iterator[None]:
    """During the body, ask Slurm for a job's start and end, which may change, and write them to a file, for rank 0.

    The environment of the ranks gets the times as they are now, and the file's path. With `limit_s`, they are those of
    a task that begins now, in a part of the job.
    """
    over, began_s = threading.Event(), int(time.time())
    said = _of_task(ask_times(label, env, tries=3), began_s, limit_s)
    if times := parse_times(said):
        env |= {"SLURM_JOB_START_TIME": str(times[0]), "SLURM_JOB_END_TIME": str(times[1])}
    env[Env.JOB_TIMES] = str(path)

    def write(answer: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the ranks know the times of the start
            path.write_text(f"{answer}\n")

    def ask() -> None:
        while not over.wait(_ASK_S):
            if answer := ask_times(label, env):
                write(_of_task(answer, began_s, limit_s))

    write(said)
    processes.start_thread(ask, "times")
    try:
        yield
    finally:
        over.set()


def ask_times(label: str, env: Mapping[str, str], *, tries: int = 1) -> str:
    """Ask Slurm when a job started and when it will end, up to so many times, `RETRY_S` apart.

    Returns:
        The answer in seconds of UNIX time: "1896087600 1896091200", or "1896087600 NONE" without a time limit. Empty if
        squeue failed each time.
    """
    argv = ["squeue", "--noheader", "--format=%S %e", f"--jobs={label}"]
    for left in reversed(range(tries)):
        answer = slurm_commands.ask(argv, {**env, "SLURM_TIME_FORMAT": "%s"})
        if answer.is_ok:
            return answer.words
        if left:
            time.sleep(RETRY_S)
    return ""


def _of_task(answer: str, began_s: int, limit_s: int | None) -> str:
    if limit_s is None:
        return answer
    end = began_s + limit_s
    times = parse_times(answer)
    return f"{began_s} {end if times is None else min(end, times[1])}"


def parse_times(text: str) -> tuple[int, int] | None:
    """Return start and end, in seconds of UNIX time, of an answer of `ask_times`; None if it does not name both."""
    found = re.fullmatch(r"([0-9]+) ([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def began_s(env: Mapping[str, str]) -> float | None:
    """Return when a batch script's allocation began, in seconds of UNIX time; None in a step, or if it is unknown."""
    began = env.get("SLURM_JOB_START_TIME", "")
    is_batch = env.get("ENVIRONMENT") == "BATCH" and Variables(env).step_id() is None
    return float(began) if is_batch and began.isdigit() else None
