"""A chain of jobs, where none may be requeued: an array whose tasks run one after the other (--array=0-20%1).

In the run directory and for its ranks, a chain is one job, with the array's id: the next task is what a requeue is
elsewhere, and counts as one. Slurm starts it whatever became of the one before. So each first looks whether anything is
left to do (`begin`), before its environment is set up: if that fails, it fails in all of them. The task that ends the
training takes the others out of the queue (`end`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.job import job_log, slurm_commands
from cluster_ddp.agent.job.restart.requeue import Requeue
from cluster_ddp.run import journal
from cluster_ddp.run.files import tail
from cluster_ddp.run.journal import Event
from cluster_ddp.run.names import Env, File, Then
from cluster_ddp.slurm.variables import Variables

OVER = 3
"""Exit status of `begin`: nothing is left to do."""

_LARGEST = 8 << 20
# What slurmstepd writes into a job's log: of scancel, nothing more (22.05) or "DUE to SIGNAL Terminated" (26.05).
_ENDED = r"\*\*\* JOB {} ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?"


class ChainLink(NamedTuple):
    """A task of a chain that has begun."""

    number: int
    """Its number in the array."""
    requeue: int
    """How many have begun before it; one that somebody requeued counts again."""
    slurm_job: str
    """Its own id, SLURM_JOB_ID."""
    checkpoint: str
    """The name of the newest checkpoint when it began; empty without one."""
    trains: bool = False
    """Whether its ranks have started."""
    then: str | None = None
    """What follows, once its ranks have ended: one of `Then`."""


def links(folder: Path, array: str) -> list[ChainLink]:
    """Return the tasks of a chain that have begun, in this order."""
    found: list[ChainLink] = []
    for one in journal.events(folder):
        is_link = one.get("event") == Event.LINK and one.get("job") == array
        if is_link and type(one.get("number")) is type(one.get("requeue")) is int:
            before = found if one["requeue"] else []
            told = (str(one.get("slurm_job")), str(one.get("checkpoint")))
            found = [*before, ChainLink(one["number"], one["requeue"], *told)]
    for start in journal.starts(folder):
        then = None if start.end is None else start.end.then
        found = [
            one._replace(trains=True, then=then) if (array, one.requeue) == (start.job, start.requeue) else one
            for one in found
        ]
    return found


def begin(folder: Path, env: Mapping[str, str]) -> int:
    """Look whether anything is left to do, and note that a task begins. If nothing is, cancel the others.

    Args:
        folder: the run directory.
        env: as Slurm has given it to the job.

    Returns:
        The exit status: 0, or `OVER`.
    """
    array, number = env["SLURM_ARRAY_JOB_ID"], int(env["SLURM_ARRAY_TASK_ID"])
    was_requeued = Variables(env).requeues() > 0  # by somebody who wants it to run
    before = links(folder, array) if number or was_requeued else []
    if not was_requeued and (over := _over(folder, array, before)):
        job_log.say(f"Job {array}_{number}: nothing is left to do: {over}.")
        _cancel_others(array, env)
        return OVER
    requeue = max(number, before[-1].requeue + 1) if before else number
    values = {"number": number, "requeue": requeue, "slurm_job": env["SLURM_JOB_ID"], "checkpoint": _newest(folder)}
    journal.append(folder, Event.LINK, shared=bool(folder.stat().st_mode & 0o040), job=array, **values)
    return 0


def in_chain(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a chain's task: as if one job was requeued so often."""
    array, number = env["SLURM_ARRAY_JOB_ID"], env["SLURM_ARRAY_TASK_ID"]
    noted = [one.requeue for one in links(folder, array) if one.slurm_job == env["SLURM_JOB_ID"]]
    kept = {name: value for name, value in env.items() if not name.startswith("SLURM_ARRAY_")}
    ours = {Env.CHAIN: array, Env.SLURM_RESTARTS: str(Variables(env).requeues())}
    return {**kept, **ours, "SLURM_RESTART_COUNT": str(noted[-1]) if noted else number}


def end(
    env: Mapping[str, str],
    number: int,
    why: str,
    *,
    leave: Mapping[str, str] = {},
    changes: Sequence[str] = (),
    needed: int = 1,
    most: int,
) -> bool:
    """Let the chain continue in its next task, or end it. Returns whether it continues.

    Args:
        env: of this task.
        number: its number.
        why: why the training is to be continued; empty if it is not.
        leave: nodes that the next tasks are to exclude -> why.
        changes: what else they are to ask for; see `Requeue`.
        needed: with how many nodes they can start.
        most: the number of the last task.
    """
    array, following = env[Env.CHAIN], number + 1
    if why and _waits(array, following, env):
        if leave or changes:
            next_task = f"{array}_{following}"
            Requeue(next_task, env, leave=leave, changes=changes, needed=needed, last=most).exclude()
        job_log.say(f"{why}: continues in job {array}_{following}.")
        return True
    if why:
        gone = "--max-requeues is reached" if following > most else f"job {array}_{following} was cancelled"
        job_log.say(f"error: {why}, but no job follows: {gone}.")
    _cancel_others(array, env)
    return False


def _newest(folder: Path) -> str:
    """The name of the newest checkpoint; empty without one."""
    return tail(folder / File.PROGRESS, 4096).strip()


def _over(folder: Path, array: str, before: Sequence[ChainLink]) -> str:
    """Why nothing is left to do; empty if the training is to continue. Where nothing is known, it is."""
    if not before:
        return ""
    last = before[-1]
    name = f"job {array}_{last.number}"
    if last.then is not None:
        return f"{name} has ended the training" if last.then == Then.END else ""
    if not last.trains:
        return f"{name} ended before it started its ranks"
    said = re.search(_ENDED.format(re.escape(last.slurm_job)), tail(folder / File.JOB_LOG, _LARGEST))
    if said and not said[1]:
        return f"{name} was cancelled"
    two = before[-2:]
    if len(two) == 2 and two[0].then is None and {one.checkpoint for one in two} == {_newest(folder)}:
        return f"jobs {array}_{two[0].number} and {array}_{last.number} ended without a new checkpoint"
    return ""


def _waits(array: str, number: int, env: Mapping[str, str]) -> bool:
    """Whether a task is still in the queue. If Slurm does not answer, it is."""
    argv = ["squeue", "--noheader", "--array", "--states=PENDING", "--format=%K", f"--jobs={array}"]
    answer = slurm_commands.ask(argv, env)
    return not answer.is_ok or str(number) in answer.words.split()


def _cancel_others(array: str, env: Mapping[str, str]) -> None:
    slurm_commands.ask(["scancel", "--state=PENDING", array], env)
