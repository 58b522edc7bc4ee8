"""Whether the job is started again: after a stop in time, after a failure, without nodes at fault.

It runs on the batch host, in the job's agent, when all ranks have ended. The job is requeued under its own id; of an
array, only this task. `scontrol` asks for it. No failure here ends the process: a log on a full disk, a file that can't
be read or a controller that is away for minutes must not cost the requeue.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent.job import report, scontrol
from cluster_ddp.contract import EXIT_STOPPED, Env, File
from cluster_ddp.files import open_own

RETRY_S = 5.0
"""Seconds between two questions for the job's times: a busy controller may not answer at once."""

NOT_FINISHED = f"""\
error: A training was stopped in time, but the command ended with status 0:
  the job is not finished, and does not start again.
  Hint: let the command end with the training's status ({EXIT_STOPPED}), as with set -e in a shell script."""

_LARGEST_FILE = 1 << 20
_WITHOUT_PROGRESS = 4  # so many failures with the same newest checkpoint: three restarts were of no use


class Policy(NamedTuple):
    """When a job is requeued."""

    max_requeues: int = 20
    """A job that stopped in time is started again at most so often."""
    on_failure: int = 0
    """A job that failed is started again at most so often; 0: never."""
    elsewhere: int = 0
    """So many nodes at fault are left behind at most, in all starts of the job together; 0: none."""


def label(env: Mapping[str, str]) -> str:
    """Return the job's name for scontrol, squeue and messages: "12", or "12_3" for a task of an array.

    Raises:
        KeyError: it is not that of a job.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]


def ask_times(label: str, env: Mapping[str, str], *, tries: int = 1) -> str:
    """Ask Slurm when the job started and when it will end.

    Args:
        label: of the job; see `label`.
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


class Requeue:
    """The requeue of this job.

    Args:
        policy: when to requeue.
        env: the environment of the batch script, and of scontrol.
        run_dir: the run directory; None if there is none. Nodes at fault are not known then.

    Raises:
        KeyError: the environment is not that of a job.
    """

    def __init__(self, policy: Policy, env: Mapping[str, str], run_dir: Path | None) -> None:
        self._policy, self._env, self._run_dir = policy, env, run_dir
        self._job = label(env)
        self._restarts = int(env.get("SLURM_RESTART_COUNT") or 0)  # unset on the first start; 0 from Slurm 26.11 on
        self._sick_before = 0

    def begin(self) -> None:
        """Note which nodes at fault are known already: only those that this start finds are left behind after it.

        Call it before ranks start. The first start forgets those, and the failures, of an earlier job in this run
        directory.
        """
        if self._run_dir is not None and self._restarts == 0:
            for name in (File.SICK_NODES, File.FAILURES):
                with contextlib.suppress(OSError):
                    (self._run_dir / name).unlink()
        self._sick_before = len(self._lines(File.SICK_NODES))

    def after(self, status: int, *, stopped: bool, asking: Callable[[], object] = lambda: None) -> bool:
        """Requeue the job, if it is to be started again. Call it in the main thread.

        Slurm ends this process with TERM soon after it accepted the request, and this method does not return. So say
        and write before what is to be said of this start. Only if nodes are left behind, TERM waits until they are
        excluded, and then this returns.

        Args:
            status: exit status of the ranks' command; 128 + N for signal N.
            stopped: whether a rank stopped in time. The job's own status is then `EXIT_STOPPED`, whatever `status` is:
                srun and torchrun may report another one.
            asking: is called before Slurm is asked for it.

        Returns:
            True: Slurm is ending this start. End this process soon. False: the job is not requeued. If one would expect
            a requeue, the log says why not.
        """
        leave = self._nodes_at_fault() if status != 0 else []
        if not (why := self._why(status, stopped, bool(leave))):
            return False
        report.say(f"{why}: requeueing job {self._job} (restart {self._restarts + 1}).")
        for node, fault in leave:
            report.say(f"Requeueing job {self._job} without {node}: {fault}")
        asking()
        return scontrol.Requeueing(self._job, [node for node, _ in leave], self._env).ask()

    def _why(self, status: int, stopped: bool, on_node_at_fault: bool) -> str:
        """Why to requeue; empty if not."""
        if status == EXIT_STOPPED or (stopped and status != 0):
            return "Stopped in time" if may_restart(self._restarts, self._policy.max_requeues) else ""
        if stopped:
            report.say(NOT_FINISHED)
        elif status != 0 and on_node_at_fault:
            return f"Failed with status {status} on a node at fault"
        elif status != 0 and self._policy.on_failure and self._may_fail_again():
            return f"Failed with status {status}"
        return ""

    def _may_fail_again(self) -> bool:
        """Note this failure with the newest checkpoint, and compare it with the earlier ones."""
        newest = next(iter(self._lines(File.PROGRESS)), "") or "none"
        noted = self._note_failure(newest)
        failures = len(noted) or self._restarts + 1  # not to be counted: each start may have failed
        if failures > self._policy.on_failure:
            why = f"failed {failures} times (--requeue-on-failure {self._policy.on_failure})"
        elif noted[-_WITHOUT_PROGRESS:] == [newest] * _WITHOUT_PROGRESS:
            why = f"failed four times without a new checkpoint (the newest: {newest})"
        else:
            return True
        report.say(f"error: {why}; not started again.")
        return False

    def _note_failure(self, newest: str) -> list[str]:
        """The newest checkpoint at each failure, this one last; empty if it can't be written."""
        if self._run_dir is None:
            return []
        flags, shared = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, self._env.get(Env.SHARE) == "1"
        try:
            with open(open_own(self._run_dir / File.FAILURES, flags, shared=shared), "ab", buffering=0) as file:
                file.write(f"{newest}\n".encode())
        except OSError:
            return []
        return self._lines(File.FAILURES)

    def _lines(self, name: str) -> list[str]:
        """The lines of a file of the run directory; none if it can't be read, or is a symbolic link."""
        if self._run_dir is None:
            return []
        try:
            with open(open_own(self._run_dir / name, os.O_RDONLY | os.O_NONBLOCK, shared=False), "rb") as file:
                text = file.read(_LARGEST_FILE).decode(errors="replace")
        except OSError:
            return []
        return text.removesuffix("\n").split("\n") if text else []

    def _nodes_at_fault(self) -> list[tuple[str, str]]:
        """Nodes of this job that this start found at fault, each with why."""
        lines = self._lines(File.SICK_NODES) if self._policy.elsewhere else []
        if len(lines) <= self._sick_before:
            return []
        argv = ["scontrol", "show", "hostnames", self._env.get("SLURM_JOB_NODELIST", "")]
        answer = scontrol.ask(argv, self._env)
        nodes = answer.words.split() if answer.is_ok else []
        noted, found = set(), []
        for number, line in enumerate(lines):
            node, _, fault = line.partition(" ")
            is_new = number >= self._sick_before
            if not node or node in noted or (is_new and node not in nodes):
                continue
            noted.add(node)
            if is_new and len(noted) <= self._policy.elsewhere:
                found.append((node, fault))
        return found
