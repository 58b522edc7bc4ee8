"""The requeue of a job: after a stop in time, or a failure; without nodes at fault.

It runs on the batch host, in the job's agent, when all ranks have ended. The job is requeued under its own id; of an
array, only this task. `scontrol` asks for it. No failure here ends the process: a log on a full disk, a file that can't
be read or a controller that is away for minutes must not cost the requeue.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cluster_ddp.agent.job import report, scontrol
from cluster_ddp.contract import EXIT_STOPPED

RETRY_S = 5.0
"""Seconds between two questions for the job's times: a busy controller may not answer at once."""

NOT_FINISHED = f"""\
error: A training was stopped in time, but the command ended with status 0:
  the job is not finished, and does not start again.
  Hint: let the command end with the training's status ({EXIT_STOPPED}), as with set -e in a shell script."""


def ask_times(label: str, env: Mapping[str, str], *, tries: int = 1) -> str:
    """Ask Slurm when the job started and when it will end.

    Args:
        label: of the job.
        env: the environment of squeue.
        tries: how often to ask, `RETRY_S` apart, until there is an answer.

    Returns:
        The answer in seconds of UNIX time: "1896087600 1896091200", or "1896087600 NONE" without a time limit. Empty if
        squeue failed each time.
    """
    argv = ["squeue", "--noheader", "--format=%S %e", f"--jobs={label}"]
    for left in reversed(range(tries)):
        answer = scontrol.ask(argv, {**env, "SLURM_TIME_FORMAT": "%s"})
        if answer.is_ok:
            return answer.words
        if left:
            time.sleep(RETRY_S)
    return ""


def parse_times(text: str) -> tuple[int, int] | None:
    """Return start and end, in seconds of UNIX time, of an answer of `ask_times`; None if it does not name both."""
    found = re.fullmatch(r"([0-9]+) ([0-9]+)", text)
    return (int(found[1]), int(found[2])) if found else None


def may_restart(restarts: int, most: int) -> bool:
    """Whether a job that was stopped in time may start again, after so many restarts. If not, the log says why."""
    if restarts >= most:
        report.say(
            f"error: stopped in time, but started again {restarts} times already (--max-requeues {most}).\n"
            "  Hint: to resume, start it again with the same run directory; for more restarts: --max-requeues N"
        )
    return restarts < most


def ask_for(
    job: str, why: str, start: int, env: Mapping[str, str], *, leave: Mapping[str, str] = {}, nodes: int | None = None
) -> bool:
    """Have a job requeued. Call it in the main thread.

    Slurm ends this process with TERM soon after it accepted the request, and this function does not return. So say and
    write before what is to be said of this start. Only if nodes are left out, or given back, TERM waits until the job
    asks for others, and then this returns.

    Args:
        job: its label.
        why: for the log.
        start: number of the next start.
        env: the environment of scontrol.
        leave: nodes to exclude -> why.
        nodes: see `scontrol.Requeueing`.

    Returns:
        True: Slurm is ending this start. End this process soon. False: the job is not requeued, and the log says why.
    """
    report.say(f"{why}: requeueing job {job} (restart {start}).")
    for node, fault in leave.items():
        report.say(f"Requeueing job {job} without {node}: {fault}")
    return scontrol.Requeueing(job, [*leave], env, nodes).ask()
