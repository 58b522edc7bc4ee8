"""A chain of jobs: where a job is not to be requeued, the next one is submitted when one starts, and waits for its end.

In the run directory and for its ranks, a chain is one job, with the id of its first one: the next job is what a requeue
is elsewhere, and counts as one. It waits with `afterany`: a job that is killed or loses its node is continued, too. So
each job first looks whether anything is left to do (`_over`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.agent import chain_file
from cluster_ddp.agent.job import inherited_env, job_log, slurm_commands
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.errors import one_line
from cluster_ddp.run.files import read_regular
from cluster_ddp.run.names import RESUME, Env, File

OVER = 3
"""Exit status of `begin`: nothing is left to do."""

_LARGEST = 8 << 20
_HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_TRIES, _RETRY_S = 3, 5.0
_MAY_PASS = re.compile("contact|timed out|no answer|Unexpected message", re.IGNORECASE)
# What slurmstepd writes into a job's log: of scancel, nothing more (22.05) or "DUE to SIGNAL Terminated" (26.05).
_ENDED = r"\*\*\* JOB {} ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?"


class Link(NamedTuple):
    """One job of a chain."""

    job: str
    """Its id."""
    first: str
    """The id of the chain's first job."""
    number: int
    """How many jobs of the chain were before it."""

    def __str__(self) -> str:
        return f"Job {self.job}, {chain_file.in_words(self.number)} of job {self.first}"


def link_of(words: Sequence[str], env: Mapping[str, str]) -> Link:
    """Return the link that a job is, by the arguments of its script: none, or the first job and the number."""
    first, number = words if len(words) == 2 else (env["SLURM_JOB_ID"], "0")
    return Link(env["SLURM_JOB_ID"], first, int(number))


def in_chain(words: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a link: as if its chain's first job was requeued so often."""
    link = link_of(words, env)
    return {**env, Env.CHAIN: link.first, "SLURM_RESTART_COUNT": str(link.number)}


def begin(folder: Path, most: int, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Submit the job after this one, and print its id. Call it in the environment that this job got from Slurm.

    Args:
        folder: the run directory.
        most: how many jobs may follow the first one.
        words: the arguments of the job's script.
        env: the environment.

    Returns:
        The exit status: 0; or `OVER`, if nothing is left to do.
    """
    for number in _HELD:  # what is submitted is also noted; a job that is cancelled now is looked for below
        signal.signal(number, signal.SIG_IGN)
    link = link_of(words, env)
    if over := _over(folder, link):
        job_log.say(f"{link}: nothing is left to do: {over}.")
        return OVER
    following, why = ("", "") if link.number >= most else _submit(folder, link, env)
    record = {"number": link.number, "next": following, "why": why, "checkpoint": _newest(folder)}
    chain_file.note(folder, link.job, record)
    if following and chain_file.is_cancelled(folder):  # it may have read the file before this record was there
        slurm_commands.ask(["scancel", following], env)
        return OVER
    after = f"; after it: job {following}" if following else ""
    job_log.say(f"{link}{after}.")
    print(following)
    return 0


def end(
    folder: Path | None, following: str, env: Mapping[str, str], why: str, leave: Mapping[str, str], needed: int
) -> bool:
    """Let the chain continue in the next job, or end it. Returns whether it continues.

    Args:
        folder: the run directory; None without one.
        following: the id of the next job; empty without one.
        env: of this job.
        why: why this one is to be continued; empty if it is not.
        leave: nodes that the next one is to exclude -> why.
        needed: with how many nodes it can start.
    """
    job = env["SLURM_JOB_ID"]
    continues = bool(why) and _waits(following, env) and not chain_file.is_cancelled(folder)
    chain_file.note(folder, job, {"continues": continues})
    if continues:
        requeue.Requeue(following, env, leave=leave, needed=needed).exclude()
        job_log.say(f"{why}: continues in job {following}, {chain_file.in_words(int(env['SLURM_RESTART_COUNT']) + 1)}.")
    elif why:
        gone = f"job {following} was cancelled" if following else "Slurm refused it, or --max-requeues is reached"
        job_log.say(f"error: {why}, but no job follows: {gone}.")
    if following and not continues:
        slurm_commands.ask(["scancel", following], env)
    return continues


def _over(folder: Path, link: Link) -> str:
    """Why nothing is left to do; empty if the training is to continue. Where nothing is known, it is."""
    if chain_file.is_cancelled(folder):
        return "the chain was cancelled"
    records = chain_file.records(folder)
    if first := [one["job"] for one in records if one.get("number") == 0 and one["job"] != link.first]:
        return f"job {first[0]} has resumed the run"
    if twin := [one["job"] for one in records if one.get("number") == link.number and one["job"] != link.job]:
        return f"job {twin[0]} has begun in its place"
    before = next((one for one in records if one.get("number") == link.number - 1), None)
    if before is None:
        return ""
    job, found = before["job"], dict[str, Any]()
    for one in records:
        found |= one if one["job"] == job else {}
    if "continues" in found:
        return "" if found["continues"] else f"job {job} has ended the training"
    if "trains" not in found:
        return f"job {job} ended before it started its ranks"
    said = re.search(_ENDED.format(re.escape(job)), job_log.tail(folder / File.JOB_LOG, _LARGEST))
    if said and not said[1]:
        return f"job {job} was cancelled"
    is_late = said is not None and said[1].startswith("TIME LIMIT")
    if is_late and _newest(folder) == found.get("checkpoint"):
        return f"job {job} reached its time limit without a new checkpoint"
    return ""


def _submit(folder: Path, link: Link, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the id of the next job, or why there is none."""
    options = [f"--dependency=afterany:{link.job}", f"--output={folder}/{File.JOB_LOG}", *_comment(folder)]
    if link.number:  # the job before may have found nodes at fault
        shown = slurm_commands.ask(["scontrol", "show", "job", link.job], env)
        options += [f"--exclude={nodes}" for nodes in [requeue.node_lists(shown.words).get("Exc")] if nodes]
    argv = ["sbatch", "--parsable", *options, str(folder / File.BATCH_SCRIPT), link.first, str(link.number + 1)]
    for left in reversed(range(_TRIES)):
        answer = slurm_commands.ask(argv, inherited_env.inherited(env), with_stderr=True)
        job = re.fullmatch(r"(\d+)(;.*)?", answer.words.splitlines()[-1] if answer.words else "")
        if answer.is_ok and job:
            return job[1], ""
        if not _MAY_PASS.search(answer.words):
            break
        time.sleep(_RETRY_S if left else 0)
    why = one_line(answer.words)
    job_log.say(
        f"error: Submitting the next job of the chain on {os.uname().nodename}:\n  Slurm said: {why}\n"
        f"  This job trains, and no other follows it. Hint: once it has ended: {RESUME} {folder}\n"
        "  If no job may be submitted on nodes here, write nodes_submit = false into cluster.toml."
    )
    return "", why or "sbatch said nothing"


def _comment(folder: Path) -> list[str]:
    """The option that gives the next job what tells this run's jobs from others with the same ids."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        comment = json.loads(read_regular(folder / File.SPEC, _LARGEST))["identity"]["comment"]
        return [f"--comment={comment}"]
    return []


def _waits(job: str, env: Mapping[str, str]) -> bool:
    """Whether a job is still in the queue. If Slurm does not answer, it is."""
    if not job:
        return False
    answer = slurm_commands.ask(["squeue", "--noheader", "--format=%T", f"--jobs={job}"], env)
    return not answer.is_ok or answer.words == "PENDING"


def _newest(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return read_regular(folder / File.PROGRESS, 4096).decode(errors="replace").strip()
    return ""
