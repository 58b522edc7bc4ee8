"""The one caller of Slurm's commands (sbatch, squeue, scontrol, scancel, sinfo).

Argument lists, never a shell; a time limit on each; what the command printed to stderr is in the error.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster_ddp.errors import JobNotFoundError, SlurmError

TIMEOUT_S = 60.0


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    text: str | None = None,
    timeout_s: float | None = None,
    words_on_stderr: bool = False,
) -> str:
    """Run a Slurm command to its end and return what it printed to stdout.

    Args:
        argv: the command and its arguments.
        env: its environment; ours by default.
        text: what it reads from stdin; nothing by default.
        timeout_s: seconds after which it is ended; default: `TIMEOUT_S`.
        words_on_stderr: return what it printed to stderr instead, where some commands answer.

    Raises:
        SlurmError: it isn't installed, failed, or took longer than `timeout_s`.
    """
    asked, timeout_s = f"Running {' '.join(argv)}:", timeout_s or TIMEOUT_S
    try:
        done = subprocess.run(
            argv,
            env=None if env is None else dict(env),
            input=text or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            start_new_session=True,  # a terminal's Ctrl-C is ours to answer: sbatch might have done its work
        )
    except FileNotFoundError as error:
        hint = "run this where Slurm's commands are, on a login node say, or try: cluster-ddp sandbox up"
        raise SlurmError(asked, f"there is no {argv[0]} on the PATH.", hint) from error
    except subprocess.TimeoutExpired as error:
        hint = "is the controller up? Ask it with: scontrol ping"
        raise SlurmError(asked, f"no answer within {timeout_s:g} s.", hint) from error
    if done.returncode != 0:
        raise _refused(asked, argv[0], done)
    return done.stderr if words_on_stderr else done.stdout


def _refused(asked: str, program: str, done: subprocess.CompletedProcess[str]) -> SlurmError:
    found = done.stderr.strip() or f"exit status {done.returncode}, without a word."
    kind = JobNotFoundError if "Invalid job id" in found else SlurmError
    return kind(asked, found, _hint(program, found))


# What sbatch says (22.05 to 26.05) -> what mends it. The first that is found in its words counts.
_HINTS = (
    ("account/partition", "name an account that may use it: --account; see: sacctmgr show associations user=$USER"),
    ("invalid account", "name your account: --account; see: sacctmgr show associations user=$USER"),
    ("invalid partition", "name one of: sinfo -o %P"),
    ("No partition specified", "name one of: sinfo -o %P"),
    ("invalid qos", "name one of yours: --qos; see: sacctmgr show associations user=$USER format=qos"),
    ("time limit", "ask for less: --time; each partition's limit: sinfo -o '%P %l'"),
    ("generic resource", "ask for GPUs that the nodes have, by the name they have there: sinfo -o '%P %G'"),
    ("node configuration is not available", "no node has all of that at once: sinfo -o '%P %D %c %m %G %f'"),
    ("node count specification", "ask for fewer nodes; how many there are: sinfo -o '%P %D'"),
    ("memory specification", "ask for less memory; what the nodes have (MB): sinfo -o '%P %m'"),
    ("invalid job array", "the cluster allows fewer tasks: scontrol show config | grep MaxArraySize"),
    ("violates accounting", "a limit of your account or QOS; see: sacctmgr show associations user=$USER"),
    ("invalid feature", "name features that the nodes have: sinfo -o '%P %f'"),
    ("dependency", "see whether that job is still known: scontrol show job ID"),
    ("contact slurm controller", "is it up? Ask it with: scontrol ping"),
    ("Invalid job id", "jobs are forgotten some minutes after their end; where there is accounting: sacct -j ID"),
)  # fmt: skip


def _hint(program: str, words: str) -> str:
    generic = f"try it by hand; its options: {program} --help"
    return next((hint for sign, hint in _HINTS if sign.lower() in words.lower()), generic)


def available(env: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm's commands are here and a controller answers them."""
    try:
        run(["sinfo", "--noheader"], env=env, timeout_s=10)
    except SlurmError:
        return False
    return True


class Submitted(NamedTuple):
    """What sbatch answers."""

    job_id: int
    """The job; for an array the whole array."""
    cluster: str | None = None
    """Which cluster took it, where there are several (sbatch --clusters, federations)."""


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
        script: path of the script; None where its `text` is given.
        text: of the script.
        options: for sbatch, before the script.
        arguments: for the script.
        env: the environment of sbatch, which the job inherits.

    Raises:
        SlurmError: sbatch refused, in its words.
    """
    where = [] if script is None else [os.fspath(script), *arguments]
    answer = run(["sbatch", "--parsable", *options, *where], env=env, text=text).split()
    match = re.fullmatch(r"(\d+)(?:;(.+))?", answer[-1] if answer else "")
    if match is None:
        found = f"instead of a job id it answered {' '.join(answer)!r}."
        raise SlurmError("Running sbatch --parsable:", found, "is sbatch another program here? See: type -a sbatch")
    return Submitted(job_id=int(match[1]), cluster=match[2])


def cancel_by_comment(comment: str) -> bool:
    """Cancel the job that sbatch may have submitted although it gave no answer in time.

    It is looked for as long again: the controller may be as slow with the job as with its answer.

    Args:
        comment: that only this job has.

    Returns:
        Whether it was found.

    Raises:
        SlurmError: it was found, and can't be cancelled.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        lines: list[str] = []
        with contextlib.suppress(SlurmError):
            lines = run(["squeue", "--me", "--noheader", "--format=%F %k"]).splitlines()
        if ids := {line.split()[0] for line in lines if line.split()[1:] == [comment]}:
            run(["scancel", *ids])
            return True
        time.sleep(1)
    return False


def on(cluster: str | None) -> list[str]:
    """The option that sends a command to a cluster; none for the default one."""
    return [] if cluster is None else [f"--clusters={cluster}"]
