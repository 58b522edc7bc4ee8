"""Ends a packed task at its time limit, or if it is cancelled: Slurm knows the time of the whole job only.

As Slurm does with a job: the signal that was asked for comes before, then TERM, and KILL half a minute later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import first_failure
from cluster_ddp.agent.job import job_log, slurm_commands
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.supervision.supervisor import PATIENCE_S
from cluster_ddp.run.files import refresh
from cluster_ddp.run.names import File
from cluster_ddp.run.outcome import KILL, TERM, Outcome

_LOOK_S, _TERM_S = 2.0, 2.0
_NEVER = float("inf")
_STATUSES = {"CANCELLED": 143, "TIMEOUT": 1}


class TaskLimits:
    """The limits of one packed task, over all its starts in this job, by its options, environment and run directory."""

    def __init__(self, options: AgentOptions, env: Mapping[str, str], folder: Path | None) -> None:
        self._env, self._folder, self._limit_s = env, folder, options.time_limit_s
        name, _, before_s = options.signal.removeprefix("R:").partition("@")
        self._warning: signal.Signals | None = None
        if name:
            number = int(name) if name.isdecimal() else signal.Signals[f"SIG{name.removeprefix('SIG')}"]
            self._warning = signal.Signals(number)
        self._before_s = float(before_s or 60)
        self._end_at = self._warn_at = self._kill_at = _NEVER
        self._has_begun, self._suspensions = False, processes.Suspensions()
        self._state = ""

    def look(self, step: str, send: Callable[[signal.Signals], object], end: Callable[[], object]) -> float:
        """Do what is due. Returns after how many seconds to look again.

        Args:
            step: the id of the step that runs; empty while its tasks have not begun.
            send: sends a signal to all its tasks.
            end: ends it by TERM: srun then kills the tasks.
        """
        now, missed_s = time.monotonic(), self._suspensions.missed_s(_LOOK_S)
        self._end_at, self._warn_at, self._kill_at = (
            at + missed_s for at in (self._end_at, self._warn_at, self._kill_at)
        )
        if step and not self._has_begun:
            self._has_begun = True
            self._end_at = _NEVER if self._limit_s is None else now + self._limit_s
            self._warn_at = self._end_at - self._before_s if self._warning is not None else _NEVER
        if now >= self._warn_at and self._warning is not None:
            self._warn_at = _NEVER
            send(self._warning)
        if not self._state:
            self._state = "CANCELLED" if self._is_cancelled() else "TIMEOUT" if now >= self._end_at else ""
            if self._state:
                self._end(step, end)
        if now >= self._kill_at:
            self._kill_at = _NEVER
            end()
        return min(_LOOK_S, *(max(0.0, at - now) for at in (self._warn_at, self._end_at, self._kill_at) if at > now))

    def judged(self, ended: Outcome) -> Outcome:
        """Return how a start ended: if it was ended from here, that counts.

        If Slurm ends the job, TERM ends this process, too, a moment later: then the task has not failed.
        """
        if self._state and ended.status:
            return Outcome(ended.job, ended.start, self._state, _STATUSES[self._state])
        may_be_slurms = ended.first is None or ended.first.host == first_failure.SRUN or ended.status in (TERM, KILL)
        if ended.state == "FAILED" and may_be_slurms:
            time.sleep(_TERM_S)
        return ended

    def _end(self, step: str, end: Callable[[], object]) -> None:
        job_log.say(
            "Cancelled." if self._state == "CANCELLED" else f"The task's time limit of {self._limit_s} s is over."
        )
        self._warn_at, self._kill_at = _NEVER, time.monotonic() + PATIENCE_S
        argv = ["scancel", "--signal=TERM", f"{self._env['SLURM_JOB_ID']}.{step}"]
        instead = slurm_commands.why_not_this_start(self._env["SLURM_JOB_ID"], self._env)
        if not step or instead.words or not slurm_commands.ask(argv, self._env).is_ok:
            end()

    def _is_cancelled(self) -> bool:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                refresh(self._folder)
                return os.path.lexists(self._folder / File.CANCEL)
        return False
