"""A job on this machine, without Slurm: it does what Slurm and `slurm_job` do on a cluster.

It starts the agents of the tasks, as srun would; warns them before the time limit; starts all again if they were
stopped in time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import channel_server, launch_env, rank_notes
from cluster_ddp.agent.job import job_log, srun_step
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.agent.job.restart.failures import History
from cluster_ddp.agent.job.srun_step import On
from cluster_ddp.agent.job.start_loop import BaseJob, Starts
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.supervision.supervisor import Supervisor
from cluster_ddp.errors import RunDirError
from cluster_ddp.run.names import Env, File, Then
from cluster_ddp.run.outcome import Outcome

WARNING_S = 90
"""How many seconds before the time limit the ranks get the warning, USR1."""

_KILL_AFTER_S = 10.0
_LOOK_S = 2.0
_NEVER = float("inf")


class LocalJob(BaseJob):
    """A job on this machine."""

    def __init__(self, options: AgentOptions, env: Mapping[str, str]) -> None:
        assert options.ranks is not None
        self.size, self.options = Shape(1, options.ranks, None, options.cpus_per_task), options
        self.label = self.job = str(os.getpid())
        self.folder = launch_env.run_dir(options, self.label)
        self.requeues = 0
        self.added = launch_env.common(options, self.folder) | self.begin_start(srun_step.ALL, 0)
        self.env = {**env, **self.added}
        self._suspensions = processes.Suspensions()

    def command(self) -> list[str]:
        """Return the command that starts a task."""
        return srun_step.task(self.options)

    def run(self) -> int:
        """Run the ranks to their end; start them again if they were stopped in time. Returns the exit status.

        Raises:
            RunDirError: the log of a task can't be written.
            RendezvousError: there is no free port.
        """
        processes.adopt_orphans()
        history = History(self.folder, self.label, is_first=True, shared=self.options.share)
        with contextlib.closing(history):
            while True:
                with rank_notes.folder() as stacks:
                    self.env |= {**launch_env.common(self.options, self.folder), Env.STACKS: str(stacks)}
                    starts = Starts(self, history)
                    ended = starts.run()
                if ended.state != "STOPPED" or not self._continues(ended, starts, history):
                    break
                self.requeues += 1
        srun_step.clean_up(self.options, self.env, ended.status)
        job_log.show_how_to_resume(ended.status, self.added)
        if ended.state != "COMPLETED":
            processes.kill_all_below()  # those that a killed task has left behind
        return ended.status

    def _continues(self, ended: Outcome, starts: Starts, history: History) -> bool:
        """Whether the job starts again after a stop in time. What follows is noted."""
        if starts.tasks_status == 0:
            job_log.say(requeue.NOT_FINISHED)
        may = starts.tasks_status != 0 and not starts.has_killed
        again = may and requeue.may_restart(self.requeues, self.options.max_requeues)
        history.end(ended._replace(then=Then.REQUEUE) if again else ended._replace(state="FAILED"))
        return again

    def listen(self) -> tuple[socket.socket, str]:
        """Return a socket that listens for the tasks, and its host as they name it. See `BaseJob`."""
        return channel_server.listen_here(), "127.0.0.1"

    def begin_start(self, on: On, number: int) -> dict[str, str]:
        """Begin a start: with the whole time limit. Returns its variables."""
        limit_s = _NEVER if self.options.time_limit_s is None else self.options.time_limit_s
        self._state = ""  # why all are ended, if not by themselves
        self._deadline = time.monotonic() + limit_s
        self._warn_at = self._deadline - WARNING_S if limit_s > WARNING_S else _NEVER
        return launch_env.on_this_machine(self.options, self.size.world_size, number, self.requeues)

    def start_step(self, on: On, reports: TaskReports) -> Supervisor:
        """Start the agents of the tasks. See `BaseJob`."""
        if not on.is_first:
            processes.kill_all_below()  # what the start before has left behind
        cancel = functools.partial(self._end, "CANCELLED")
        no_notes = Notes(Path(os.devnull))  # the ranks have supervisors of their own
        self._supervisor = Supervisor(no_notes, lambda end: None, patience_s=_KILL_AFTER_S, on_term=cancel)
        doctor = self.options.doctor and on.is_first
        command = srun_step.task(replace(self.options, doctor=doctor))
        for task in range(self.size.tasks(self.options.launcher)):
            own = launch_env.of_local_rank(self.options, task) if self.options.launcher == "srun" else {}
            log = None if self.folder is None else self.folder / File.TASK_LOG.format(task)
            try:
                self._supervisor.start(task, command, {**self.env, **own}, log=log)
            except OSError as error:
                found = f"{error.strerror}: {error.filename}."
                raise RunDirError(f"Starting task {task}:", found, "choose another folder: --run-dir PATH") from error
        self._suspensions.missed_s()
        return self._supervisor

    def _end(self, state: str) -> None:
        self._state = self._state or state
        self._supervisor.end()

    def look(self, step: str, send: Callable[[signal.Signals], object], end: Callable[[], object]) -> float:
        """Warn the ranks before the time limit, and end them there. See `BaseJob`."""
        now, missed_s = time.monotonic(), self._suspensions.missed_s(_LOOK_S)
        self._warn_at, self._deadline = self._warn_at + missed_s, self._deadline + missed_s
        if now >= self._warn_at:
            self._warn_at = _NEVER
            send(signal.SIGUSR1)
        if now >= self._deadline and not self._state:
            self._end("TIMEOUT")
        return min(self._warn_at - now, self._deadline - now, _LOOK_S) if not self._state else _NEVER

    def judged(self, ended: Outcome) -> Outcome:
        """Return how a start ended: at the time limit, or cancelled, if it was ended from here."""
        if not self._state:
            return ended
        status = 143 if self._state == "CANCELLED" else 1
        return Outcome(ended.job, ended.start, self._state, status, time=ended.time)
