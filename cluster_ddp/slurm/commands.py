"""The caller of Slurm's commands (sbatch, squeue and others). The agent has its own: `agent.job.slurm_commands`.

It uses argument lists, never a shell, and limits the time of each command. An error has the command's stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.errors import JobNotFoundError, SlurmError
from cluster_ddp.waiting_notice import named_if_slow

TIMEOUT_S = 60.0


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float | None = None,
    words_on_stderr: bool = False,
) -> str:
    """Run a Slurm command to its end and return its stdout.

    Args:
        argv: the command and its arguments.
        env: its environment; default: this process's.
        text: its stdin; default: empty.
        timeout_s: seconds after which it is killed; default: `TIMEOUT_S`.
        words_on_stderr: return its stderr instead, where some commands answer.

    Raises:
        SlurmError: it isn't installed, failed (JobNotFoundError: job id invalid), or took longer than `timeout_s`.
    """
    asked, timeout_s = f"Running {' '.join(argv)}:", timeout_s or TIMEOUT_S
    _check_configuration(asked, os.environ if env is None else env)
    try:
        done = _call(argv, env, text or "", timeout_s)
    except FileNotFoundError as error:
        hint = "run this where Slurm's commands are installed, such as a login node; or try: cluster-ddp sandbox up"
        raise SlurmError(asked, f"there is no {argv[0]} on the PATH.", hint) from error
    except subprocess.TimeoutExpired as error:
        hint = "check that the controller is up: scontrol ping"
        raise SlurmError(asked, f"no answer within {timeout_s:g} s.", hint) from error
    if done.returncode != 0:
        raise _refused(asked, argv, done)
    return done.stderr if words_on_stderr else done.stdout


def _check_configuration(asked: str, env: Mapping[str, str]) -> None:
    """Slurm's commands wait a minute for a configuration file that is gone, such as that of a sandbox."""
    if path := env.get("SLURM_CONF"):
        try:
            Path(path).stat()
        except FileNotFoundError as error:
            hint = "unset SLURM_CONF, or give it the path of your cluster's slurm.conf"
            raise SlurmError(asked, f"SLURM_CONF names a file that is not there: {path}", hint) from error
        except OSError:
            return  # Slurm will say it


def _call(
    argv: Sequence[str], env: Mapping[str, str] | None, text: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    with named_if_slow(f"{argv[0]} to answer"):
        return subprocess.run(
            argv,
            env=None if env is None else dict(env),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",  # a column of fixed width may cut a letter of somebody's comment
            timeout=timeout_s,
            start_new_session=True,  # Ctrl-C must not reach sbatch, which may have submitted the job already
        )


def _refused(asked: str, argv: Sequence[str], done: subprocess.CompletedProcess[str]) -> SlurmError:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if lines and "configuration source" in lines[-1]:
        lines = lines[-1:]  # the others say where it has looked
    found = "; ".join(lines) or f"exit status {done.returncode}, no message."
    if not lines and argv[-2:-1] == ["job"]:  # scontrol 22.05, of a task, if the id is that of a job without tasks
        found = "Invalid job id specified"
    kind = JobNotFoundError if "Invalid job id" in found else SlurmError
    return kind(asked, found, _hint(argv[0], found))


# Part of a message of sbatch (22.05 to 26.05) -> hint. The first match counts.
_HINTS = (
    ("account/partition", "name an account that may use it: --account; see: sacctmgr show associations user=$USER"),
    ("invalid account", "name your account: --account; see: sacctmgr show associations user=$USER"),
    ("invalid partition", "name one of: sinfo -o %P"),
    ("No partition specified", "name one of: sinfo -o %P"),
    ("invalid qos", "name one of yours: --qos; see: sacctmgr show associations user=$USER format=qos"),
    ("SubmitJob", "your account or QOS allows fewer jobs in the queue: wait, or submit fewer (--pack, --max-requeues)"),
    ("violates accounting", "a limit of your account or QOS; see: sacctmgr show associations user=$USER"),
    ("time limit", "ask for less: --time; each partition's limit: sinfo -o '%P %l'"),
    ("generic resource", "ask for GPUs that the nodes have, by the names shown by: sinfo -o '%P %G'"),
    ("node configuration is not available", "no node has all of that together; see: sinfo -o '%P %D %c %m %G %f'"),
    ("node count specification", "ask for fewer nodes; each partition's number: sinfo -o '%P %D'"),
    ("memory specification", "ask for less memory; the nodes' memory in MB: sinfo -o '%P %m'"),
    ("invalid job array", "the cluster allows fewer tasks: scontrol show config | grep MaxArraySize"),
    ("invalid feature", "name features that the nodes have: sinfo -o '%P %f'"),
    ("dependency", "check that Slurm still knows that job: scontrol show job ID"),
    ("contact slurm controller", "check that the controller is up: scontrol ping"),
    ("configuration source", "is this a login node? Elsewhere, name the cluster's slurm.conf: export SLURM_CONF=PATH"),
    ("Invalid job id", "Slurm forgets jobs some minutes after their end; with accounting, try: sacct -j ID"),
)  # fmt: skip


def _hint(program: str, words: str) -> str:
    generic = f"try {program} in your shell; if it fails there, too, ask your cluster's support"
    return next((hint for sign, hint in _HINTS if sign.lower() in words.lower()), generic)


def cluster_name() -> str:
    """Return the name of the cluster (ClusterName in slurm.conf); empty if Slurm does not say.

    Raises:
        SlurmError: the controller doesn't answer.
    """
    match = re.search(r"^ClusterName\s*=\s*(\S+)", run(["scontrol", "show", "config"]), re.MULTILINE)
    return match[1] if match else ""


class Submitted(NamedTuple):
    """The answer of sbatch."""

    job_id: int
    """The job's id; for an array, the id of the whole array."""
    cluster: str | None = None
    """The cluster that took the job, if sbatch names one (sbatch --clusters, federations)."""


def submit(
    script: str | os.PathLike[str] | None = None,
    *,
    text: str | None = None,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Submitted:
    """Submit a batch script.

    Args:
        script: path of the script, for which the `arguments` are; or None.
        text: the script itself, for sbatch's stdin.
        options: for sbatch, before the script.
        env: the environment of sbatch, which the job inherits.

    Raises:
        SlurmError: sbatch failed (the error has its message), or did not answer with a job id.
    """
    where = [] if script is None else [os.fspath(script), *arguments]
    answer = run(["sbatch", "--parsable", *options, *where], env=env, text=text).split()
    match = re.fullmatch(r"(\d+)(?:;(.+))?", answer[-1] if answer else "")
    if match is None:
        found = f"it answered {' '.join(answer)!r} instead of a job id."
        raise SlurmError("Running sbatch --parsable:", found, "check which sbatch runs here: type -a sbatch")
    return Submitted(job_id=int(match[1]), cluster=match[2])


def cancel(jobs: Sequence[str], *, cluster: str | None = None) -> None:
    """Cancel jobs, and wait until their processes have ended, for up to `TIMEOUT_S` seconds.

    Raises:
        SlurmError: the controller doesn't answer, or refuses.
    """
    run(["scancel", *on(cluster), *jobs])
    deadline, shown = time.monotonic() + TIMEOUT_S, ["squeue", *on(cluster), "--noheader", f"--jobs={','.join(jobs)}"]
    with contextlib.suppress(SlurmError):  # it may know them no more
        while run(shown).strip() and time.monotonic() < deadline:
            time.sleep(0.5)


def cancel_by_comment(comment: str) -> bool:
    """Cancel a job that sbatch may have submitted although it did not answer in time. Returns whether it was found.

    Looks for up to `TIMEOUT_S` seconds for the job with this comment: a slow controller may list it late.

    Raises:
        SlurmError: the job was found, but can't be cancelled.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        lines: list[str] = []
        with contextlib.suppress(SlurmError):
            lines = run(["squeue", "--me", "--noheader", "--format=%F %k"]).splitlines()
        if ids := {line.split()[0] for line in lines if line.split()[1:] == [comment]}:
            cancel([*ids])
            return True
        time.sleep(1)
    return False


def on(cluster: str | None) -> list[str]:
    """The option that sends a command to a cluster, as a list; empty for None, the default cluster."""
    return [] if cluster is None else [f"--clusters={cluster}"]
