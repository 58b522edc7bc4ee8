"""A job on this machine, without Slurm: it does what Slurm and `slurm_job` do on a cluster.

It starts the agents of the tasks, as srun would; warns them before the time limit; starts all again if they were
stopped in time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import channel_server, launch_env, rank_notes
from cluster_ddp.agent.channel import Key
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.agent.job import job_log, srun_step
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.agent.job.restart.failures import History
from cluster_ddp.agent.job.restart.recovery import Recovery
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.task.supervisor import Supervisor
from cluster_ddp.errors import RunDirError
from cluster_ddp.run.names import EXIT_STOPPED, Env, File, Then
from cluster_ddp.run.outcome import Outcome

WARNING_S = 90
"""How many seconds before the time limit the ranks get the warning, USR1."""

_KILL_AFTER_S = 10.0
_LOOK_S = 2.0


class LocalJob:
    """A job on this machine."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        assert options.ranks is not None
        self.size, self.options = Shape(1, options.ranks, None, options.cpus_per_task), options
        self.label = self.job = str(os.getpid())
        self.folder = launch_env.run_dir(options, self.label)
        self.added = launch_env.common(options, self.folder) | launch_env.on_this_machine(options, options.ranks, 0)
        """Variables that the ranks get beside those of this process."""
        self._env = dict(env)
        self._limit_s = float("inf") if options.time_limit_s is None else options.time_limit_s
        self._suspensions = processes.Suspensions()
        self._state = ""  # why all are ended, if not by themselves

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
        self._history = History(self.folder, self.label, is_first=True, shared=self.options.share)
        self._recovery = Recovery(self.options, self._env, self._history)
        start = stops = 0
        while self._is_to_start_again(ended := self._start(start), stops):
            stops += ended.state == "STOPPED"
            start += 1
        self._history.close()
        srun_step.clean_up(self.options, {**self._env, **self.added}, ended.status)
        job_log.show_how_to_resume(ended.status, self.added)
        if ended.state != "COMPLETED":
            processes.kill_all_below()  # those that a killed task has left behind
        return ended.status

    def _is_to_start_again(self, ended: Outcome, stops: int) -> bool:
        """Whether a job starts again after a start, whose end is noted."""
        if ended.state == "FAILED" and self.options.restarts and ended.status != EXIT_STOPPED:  # which hides a stop
            processes.kill_all_below()
            return self._recovery.after(ended, self._reports).then == Then.RESTART
        was_stopped = ended.state == "STOPPED" and not self._supervisor.has_killed
        again = was_stopped and requeue.may_restart(stops, self.options.max_requeues)
        state = "FAILED" if ended.state == "STOPPED" and not again else ended.state
        self._history.end(ended._replace(state=state, then=Then.REQUEUE if again else Then.END))
        return again

    def _start(self, start: int) -> Outcome:
        """One start. Returns how it ended."""
        ranks = self.size.world_size
        name = self._history.begin(start)
        reports = self._reports = TaskReports(self.options.launcher, ranks, self.folder)
        shared = launch_env.common(self.options, self.folder)
        shared |= launch_env.on_this_machine(self.options, ranks, start)
        listener, key = channel_server.listen_here(), Key.of_job(shared)
        with (
            contextlib.closing(Server(listener, key, reports.hear, reports.gone)) as server,
            rank_notes.folder() as stacks,
        ):
            env = {**self._env, **shared, Env.CHANNEL: f"127.0.0.1:{server.port}", Env.STACKS: str(stacks)}
            env[Env.START_ID] = name
            no_notes = Notes(Path(os.devnull))  # the ranks have supervisors of their own
            cancel = functools.partial(self._end, "CANCELLED")
            self._supervisor = Supervisor(no_notes, lambda end: None, patience_s=_KILL_AFTER_S, on_term=cancel)
            self._state = ""
            for rank in range(ranks if self.options.launcher == "srun" else 1):
                self._start_task(rank, env)
            self._suspensions.missed_s()
            self._deadline = time.monotonic() + self._limit_s
            self._warn_at = self._deadline - WARNING_S if self._limit_s > WARNING_S else float("inf")
            status = self._supervisor.keep(self._look_at_the_clock)
            server.drain(1.0)
        return self._judged(status, start, reports)

    def _start_task(self, rank: int, env: Mapping[str, str]) -> None:
        own = launch_env.of_local_rank(self.options, rank) if self.options.launcher == "srun" else {}
        log = None if self.folder is None else self.folder / File.TASK_LOG.format(rank)
        try:
            self._supervisor.start(rank, self.command(), {**env, **own}, log=log)
        except OSError as error:
            found = f"{error.strerror}: {error.filename}."
            raise RunDirError(f"Starting task {rank}:", found, "choose another folder: --run-dir PATH") from error

    def _end(self, state: str) -> None:
        self._state = self._state or state
        self._supervisor.end()

    def _look_at_the_clock(self) -> float:
        """Do what is due. Returns the seconds until more is."""
        now, missed_s = time.monotonic(), self._suspensions.missed_s(_LOOK_S)
        self._warn_at, self._deadline = self._warn_at + missed_s, self._deadline + missed_s
        self._reports.note_suspension(missed_s)
        if now >= self._warn_at:
            self._warn_at = float("inf")
            self._supervisor.received(signal.SIGUSR1)
        if now >= self._deadline and not self._state:
            self._end("TIMEOUT")
        return min(self._warn_at - now, self._deadline - now, _LOOK_S) if not self._state else float("inf")

    def _judged(self, status: int, start: int, reports: TaskReports) -> Outcome:
        ended = Outcome(self.label, start, "COMPLETED", status, time=round(time.time(), 3))
        if self._state:
            return ended._replace(state=self._state, status=143 if self._state == "CANCELLED" else 1)
        ended = reports.judge(ended)
        if ended.state == "STOPPED" and status == 0:
            job_log.say(requeue.NOT_FINISHED)
            return ended._replace(state="FAILED")
        job_log.show(ended, reports.log_of(ended.first), self._env)
        return ended
