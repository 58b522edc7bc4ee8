"""A job on this machine, without Slurm: it does what Slurm and `job` do on a cluster.

It starts the agents of the tasks, as srun would; warns them before the time limit; starts all again if they were
stopped in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import channel, log_words, outcome, place
from cluster_ddp.agent.job import report, step
from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.notes import Notes
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.outcome import End, Outcome
from cluster_ddp.agent.secret import Key
from cluster_ddp.agent.task.keeper import Keeper
from cluster_ddp.contract import EXIT_STOPPED, Env, File

WARNING_S = 90
"""How many seconds before the time limit the ranks get the warning, USR1."""

_NOT_FINISHED = f"""\
error: A training was stopped in time, but the command ended with status 0:
  the job is not finished, and is not restarted.
  Hint: let the command end with the training's status ({EXIT_STOPPED}), as with set -e in a shell script."""
_TOO_OFTEN = "error: stopped in time, but started again {0} times already (--max-requeues {0})."
_KILL_AFTER_S = 10.0


class LocalJob:
    """A job on this machine.

    Args:
        options: of the job.
        env: the environment.
    """

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        assert options.ranks is not None
        self.ranks, self.options = options.ranks, options
        self.folder = place.run_dir(options, str(os.getpid()))
        self.added = {**place.common(options, self.folder), **place.on_this_machine(options, self.ranks, 0)}
        """Variables that the ranks get beside those of this process."""
        self._env = dict(env)
        self._limit_s = float("inf") if options.time_limit_s is None else options.time_limit_s
        self._state = ""  # why all are ended, if not by themselves

    def command(self) -> list[str]:
        """Return the command that starts a task."""
        return step.task(self.options, ignore_warnings=False)

    def run(self) -> int:
        """Run the ranks to their end; start them again if they were stopped in time. Returns the exit status.

        Raises:
            OSError: a task can't be started, or its log can't be written.
            RendezvousError: there is no free port.
        """
        processes.adopt_orphans()
        restarts = 0
        while True:
            ended, has_killed = self._start(restarts)
            if ended.state != "STOPPED" or has_killed or restarts == self.options.max_requeues:
                break
            restarts += 1
        if ended.state == "STOPPED":
            if not has_killed and ended.restart == self.options.max_requeues:
                report.say(_TOO_OFTEN.format(restarts))
            ended = ended._replace(state="FAILED")
        if self.folder is not None:
            outcome.write(self.folder, ended, shared=self.options.share)
        step.clean_up(self.options, {**self._env, **self.added}, ended.status)
        report.show_how_to_resume(ended.status, self.added)
        if ended.state != "COMPLETED":
            processes.kill_all_below()  # those that a killed task has left behind
        return ended.status

    def _start(self, restarts: int) -> tuple[Outcome, bool]:
        """One start. Returns how it ended, and whether a task had to be killed."""
        logs, hearing = report.Logs(self.folder), Hearing(self.ranks)
        shared = place.common(self.options, self.folder)
        shared |= place.on_this_machine(self.options, self.ranks, restarts)
        listener, key = channel.listen_here(), Key.of_job(shared)
        with contextlib.closing(channel.Server(listener, key, hearing.hear, hearing.gone)) as server:
            env = {**self._env, **shared, Env.CHANNEL: f"127.0.0.1:{server.port}"}
            no_notes = Notes(Path(os.devnull))  # the ranks have keepers of their own
            keeper = Keeper(no_notes, lambda end: None, patience_s=_KILL_AFTER_S, on_term=self._cancel)
            self._keeper, self._state = keeper, ""
            for rank in range(self.ranks if self.options.launcher == "srun" else 1):
                self._start_task(rank, env)
            self._deadline = time.monotonic() + self._limit_s
            self._warn_at = self._deadline - WARNING_S if self._limit_s > WARNING_S else float("inf")
            status = keeper.keep(self._look_at_the_clock)
            server.drain(1.0)
        return self._judged(status, restarts, hearing, logs), keeper.has_killed

    def _start_task(self, rank: int, env: Mapping[str, str]) -> None:
        own = place.of_local_rank(self.options, rank) if self.options.launcher == "srun" else {}
        log = None if self.folder is None else self.folder / File.TASK_LOG.format(rank)
        self._keeper.start(rank, self.command(), {**env, **own}, log=log)

    def _cancel(self) -> None:
        self._end("CANCELLED")

    def _end(self, state: str) -> None:
        self._state = self._state or state
        self._keeper.end()

    def _look_at_the_clock(self) -> float:
        """Do what is due. Returns the seconds until more is."""
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = float("inf")
            self._keeper.received(signal.SIGUSR1)
        if now >= self._deadline and not self._state:
            self._end("TIMEOUT")
        return min(self._warn_at, self._deadline) - now if not self._state else float("inf")

    def _judged(self, status: int, restarts: int, hearing: Hearing, logs: report.Logs) -> Outcome:
        ended = Outcome(job=str(os.getpid()), restart=restarts, state="COMPLETED", status=status)
        if self._state:
            return ended._replace(state=self._state, status=143 if self._state == "CANCELLED" else 1)
        if hearing.was_stopped and status == 0:
            report.say(_NOT_FINISHED)
            return ended._replace(state="FAILED", status=EXIT_STOPPED)
        if hearing.was_stopped or status == EXIT_STOPPED:
            return ended._replace(state="STOPPED", status=EXIT_STOPPED)
        if status == 0:
            return ended
        is_torchrun, folder = self.options.launcher == "torchrun", self.folder

        def log_of(rank: int | None) -> Path | None:
            name = File.TASK_LOG.format(0 if is_torchrun else rank)
            return None if folder is None or rank is None else folder / name

        def last_error(end: End) -> str:
            path = log_of(end.rank)
            return "" if path is None or end.rank is None else log_words.last_error(logs.of(path), end.rank)

        first = hearing.first_failure(last_error)
        ended = ended._replace(state="FAILED", status=first.status if first else status, first=first)
        report.show(ended, log_of(first.rank) if first else None, self._env)
        return ended
