"""The agent's caller of Slurm's commands, which needs nothing that is not frozen.

And what it asks: the nodes, the configuration, and when the job started and will end, which may change while it runs.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp import processes
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.variables import Variables

ANSWER_S = 60.0
"""Seconds after which a command that does not answer is killed."""
RETRY_S = 5.0
"""Seconds between two questions for the job's times: a busy controller may not answer at once."""
_ASK_S = 60.0
_RUNS = ("RUNNING", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED")


class CommandAnswer(NamedTuple):
    """What a command said."""

    is_ok: bool
    """Whether it ended with status 0."""
    words: str
    """Its output; if it failed, never empty."""


def ask(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    with_stderr: bool = False,
    outlives_term: bool = False,
    folder: str | None = None,
) -> CommandAnswer:
    """Run one of Slurm's commands, for `ANSWER_S` at most. Nothing is raised: a failure is an answer, too.

    Args:
        argv: the command and its arguments.
        env: its environment, with the PATH on which it is found.
        with_stderr: whether the answer has its stderr, too.
        outlives_term: block TERM in it, which Slurm may send to all processes of the job. Otherwise TERM ends it.
        folder: its working directory; None for this process's.
    """
    stderr = subprocess.STDOUT if with_stderr else subprocess.DEVNULL
    try:
        with term(signal.SIG_BLOCK if outlives_term else signal.SIG_UNBLOCK):  # a child inherits what is blocked
            child = subprocess.Popen(
                argv, env=dict(env), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
            )
    except FileNotFoundError:
        return CommandAnswer(False, f"{argv[0]}: command not found")
    except OSError as error:
        return CommandAnswer(False, f"{argv[0]}: {error.strerror}")
    with child:
        try:
            words = child.communicate(timeout=ANSWER_S)[0].decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            child.kill()
            return CommandAnswer(False, f"{argv[0]}: no answer within {ANSWER_S:g} s")
    if child.returncode != 0:
        words = words or f"{argv[0]}: exit status {child.returncode}, no message"
    return CommandAnswer(child.returncode == 0, words)


def hostnames(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a job's nodes; none if Slurm does not answer."""
    return tuple(expanded(env.get("SLURM_JOB_NODELIST", ""), env) or ())


def expanded(nodes: str, env: Mapping[str, str], *, outlives_term: bool = False) -> list[str] | None:
    """Return the names in a node list, which may be empty; None if Slurm does not answer."""
    if not nodes:
        return []
    answer = ask(["scontrol", "show", "hostnames", nodes], env, outlives_term=outlives_term)
    return answer.words.split() if answer.is_ok else None


def usable_nodes(env: Mapping[str, str], *, outlives_term: bool = False) -> set[str] | None:
    """Return the names of the nodes in a job's partition that jobs can get; None if Slurm does not answer."""
    states, partition = "--states=idle,allocated,mixed,completing", env.get("SLURM_JOB_PARTITION", "")
    argv = ["sinfo", "--Node", "--noheader", "--format=%N", states, f"--partition={partition}"]
    answer = ask(argv, env, outlives_term=outlives_term)
    return {*answer.words.split()} if answer.is_ok else None


def why_not_this_start(job: str, env: Mapping[str, str], *, outlives_term: bool = False) -> CommandAnswer:
    """Ask what Slurm does instead of the start of a job that an environment belongs to. Empty if it runs that start.

    A batch host that was cut off runs its script on when it comes back. By then Slurm may have started the job again
    elsewhere: what this start asks for would reach that one.

    Args:
        job: its label, such as "12_3".
        env: the environment of the batch script, or of a shell of salloc.
        outlives_term: see `ask`.
    """
    answer = ask(["scontrol", "--oneliner", "show", "job", job], env, with_stderr=True, outlives_term=outlives_term)
    if not answer.is_ok:
        return answer
    requeues = env.get(Env.SLURM_RESTARTS) or str(Variables(env).requeues())
    own: dict[str, Sequence[str]] = {"JobState": _RUNS, "Restarts": (requeues,)}
    if env.get("ENVIRONMENT") == "BATCH":
        own["BatchHost"] = (env.get("SLURMD_NODENAME", ""),)
    said = {name: re.search(rf"(?<!\S){name}=(\S*)", answer.words) for name in own}
    return CommandAnswer(
        True, ", ".join(found[0] for name, found in said.items() if found and found[1] not in own[name])
    )


class Configuration(NamedTuple):
    """What Slurm's configuration says of a job's tasks."""

    all_get_signals: bool = True
    """Whether a signal may reach all processes of a step, not only the first of each task (no cgroups)."""
    srun_ports: Sequence[int] = ()
    """Ports that srun may listen on, since a site lets nodes connect to them; empty for any."""
    slurmd_port: int = 6818
    """Where Slurm's daemons listen."""


def configuration(env: Mapping[str, str]) -> Configuration:
    """Ask for Slurm's configuration."""
    answer = ask(["scontrol", "show", "config"], env)
    if not answer.is_ok:
        return Configuration()
    values = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(\S+)", answer.words, flags=re.MULTILINE))
    ports = re.fullmatch(r"(\d+)-(\d+)", values.get("SrunPortRange", ""))
    usable = range(int(ports[1]), int(ports[2]) + 1) if ports and int(ports[1]) else ()
    slurmd = re.match(r"\d+", values.get("SlurmdPort", ""))
    of_slurmd = int(slurmd[0]) if slurmd else Configuration().slurmd_port
    return Configuration(values.get("ProctrackType") != "proctrack/cgroup", usable, of_slurmd)


@contextlib.contextmanager
def term(how: int) -> Iterator[None]:
    """Block TERM in this thread, or not, during the body."""
    before = signal.pthread_sigmask(how, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        answer = ask(argv, {**env, "SLURM_TIME_FORMAT": "%s"})
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
