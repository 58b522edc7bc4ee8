"""A job of Slurm that holds several tasks of an array, so many at a time.

Each task has an agent of its own, as an array's task has, which starts a step in a part of the job. What fails, fails
alone. When all have ended, tasks that were stopped in time, or whose turn did not come, are left: then the job is
requeued, and runs only those.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import array_values, launch_env
from cluster_ddp.agent.job import job_log, slurm_commands, srun_step
from cluster_ddp.agent.job.pack import packed_job
from cluster_ddp.agent.job.restart import requeue
from cluster_ddp.agent.launch_options import AgentOptions, words
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.spawn import agent, spawn
from cluster_ddp.agent.task import staged_env
from cluster_ddp.errors import counted
from cluster_ddp.run import journal, spec_file, turns
from cluster_ddp.run.names import EXIT_STOPPED, RESTART, File, Kind, Then
from cluster_ddp.run.outcome import AGENT_KILLED, Failure, Outcome
from cluster_ddp.run.turns import Turn
from cluster_ddp.slurm.variables import Variables

_HELD = (*signals.WARNINGS, signal.SIGTERM, signal.SIGCHLD)
_LONGEST_WAIT_S = 3600.0
_TERM_S = 2.0
_NAMED = 5  # of the tasks that failed


class Pack:
    """A job that holds tasks, from one requeue to the next. It has the environment of the batch script."""

    def __init__(self, options: AgentOptions, env: Mapping[str, str]) -> None:
        assert options.pack is not None
        self._options, self._env, self._at_a_time = options, dict(env), options.pack
        self._label, self._requeues = Variables(env).job_label(), Variables(env).requeues()
        self._array, _, number = self._label.partition("_")
        self._numbers = array_values.numbers(options.array)
        self._tasks = array_values.share(self._numbers, options.jobs, int(number))
        self._running: dict[int, int] = {}  # process id of an agent -> number of its task
        self._ends: dict[int, Outcome] = {}  # of tasks that have ended in this start of the job
        self._was_stopped = False

    def run(self) -> int:
        """Run the tasks that are left, and have the job requeued if it may be. Returns the exit status."""
        processes.adopt_orphans()  # an agent that was killed leaves its srun behind
        script = os.getppid()
        if self._requeues:
            job_log.say(f"{RESTART}{self._requeues} of job {self._label}.")
        signals.hold(_HELD)
        self._env |= srun_step.staged(self._options, launch_env.shape(self._options, self._env), self._env)
        copy = staged_env.use(self._options.venv or "", [""], self._env)  # of --stage-env: kept for all tasks
        waiting = [task for task in self._tasks if not self._is_done(task)]
        job_log.say(f"{counted(len(waiting), 'task')} of {len(self._tasks)} to run, {self._at_a_time} at a time.")
        while waiting or self._running:
            while waiting and len(self._running) < self._at_a_time and self._may_start():
                self._start(waiting.pop(0))
            if not self._running:
                break
            self._wait()
        staged_env.remove(copy)
        return self._finish(is_over=os.getppid() != script)

    def _finish(self, *, is_over: bool) -> int:
        """Have the job requeued if a task is left. Returns the exit status: that of the first task that failed."""
        for number in signals.WARNINGS:
            signal.signal(number, signal.SIG_IGN)  # what comes now has nobody to go to
        signals.let_come(_HELD)
        left = [task for task in self._tasks if not self._is_done(task)]
        ends = {task: ended for task in self._tasks if (ended := self._final(task)) and ended.state != "CANCELLED"}
        failed = {task: ended.status for task, ended in ends.items() if ended.status}
        status = EXIT_STOPPED if left else next(iter(failed.values()), 0)
        srun_step.clean_up(self._options, self._env, status)
        if left and is_over:
            job_log.say(requeue.SCRIPT_ENDED)
        elif left:
            requeue.Requeue(self._label, self._env).ask(f"{counted(len(left), 'task')} left", self._requeues + 1)
        if failed:
            names = ", ".join(f"{self._name(task)} (status {code})" for task, code in [*failed.items()][:_NAMED])
            more = ", …" if len(failed) > _NAMED else ""
            job_log.say(f"error: {counted(len(failed), 'task')} of {len(self._tasks)} failed: {names}{more}.")
        return status

    def _folder(self, task: int) -> Path:
        folder = launch_env.run_dir(self._options, self._name(task))
        assert folder is not None
        return folder

    def _name(self, task: int) -> str:
        return f"{self._array}_{task}"

    def _final(self, task: int) -> Outcome | None:
        ended = self._ends.get(task) or journal.last_end(self._folder(task), self._name(task))
        return None if ended is None or ended.starts_again else ended

    def _is_done(self, task: int) -> bool:
        return self._final(task) is not None or _is_elsewhere(self._folder(task))

    def _may_start(self) -> bool:
        """Whether a task may start now: the job has as much time left as the task may take.

        Those that start first may in any case: else a job that is too short would be requeued in vain.
        """
        if not self._ends:
            return True
        if self._options.time_limit_s is None:
            return not self._was_stopped
        times = slurm_commands.parse_times(slurm_commands.ask_times(self._label, self._env))
        return times is None or times[1] - time.time() >= self._options.time_limit_s

    def _start(self, task: int) -> None:
        """Start a task's agent, which writes to the task's log; or note that the task was cancelled before."""
        folder, before = self._folder(task), turns.last(self._folder(task), self._name(task))
        if os.path.lexists(folder / File.CANCEL):
            self._note(task, Outcome(self._name(task), before.starts, "CANCELLED", 143))
            return
        turn = Turn(before.starts + 1, self._requeues, time.time())
        is_noted = turns.begin(folder, self._name(task), turn, shared=self._options.share)
        starts = before.starts if is_noted else max(before.starts, self._requeues)  # else they would never end
        env = packed_job.environment(self._env, self._at_a_time, self._numbers, task, starts)
        command = [*agent(), "packed", self._label, *words(packed_job.options(self._options, env))]
        try:
            pid = spawn(command, env, log=folder / File.JOB_LOG, default=_HELD)
        except OSError as error:
            job_log.say(f"error: Starting task {self._name(task)}: {error.strerror}: {error.filename}.")
            self._note(task, Outcome(self._name(task), before.starts, "FAILED", 1))
            return
        self._running[pid] = task

    def _note(self, task: int, ended: Outcome) -> None:
        self._ends[task] = ended
        journal.append_end(self._folder(task), ended, shared=self._options.share)

    def _wait(self) -> None:
        """Wait for a signal or an end, and take it."""
        received = signals.wait(_HELD, _LONGEST_WAIT_S)
        if received is not None and received.si_signo in signals.WARNINGS:
            self._send(received.si_signo)
        elif received is not None and received.si_signo == signal.SIGTERM:
            self._end()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (task := self._running.pop(ended[0], None)) is not None:
                    self._ended(task, os.waitstatus_to_exitcode(ended[1]))

    def _end(self) -> None:
        """End, as Slurm ends the job. Nothing is noted: tasks that have not ended are left for a requeue."""
        self._send(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.let_come(_HELD)

    def _send(self, number: int) -> None:
        for pid in self._running:
            signals.send(pid, number)

    def _ended(self, task: int, code: int) -> None:
        """Take the end of a task's agent."""
        if code == -signal.SIGTERM and signals.wait([signal.SIGTERM], _TERM_S) is not None:
            self._end()  # Slurm has told all processes of the job
        turn = turns.last(self._folder(task), self._name(task))
        self._was_stopped |= code == EXIT_STOPPED
        ended = journal.last_end(self._folder(task), self._name(task))
        is_final = ended is not None and ended.time >= turn.time and not ended.starts_again
        if ended is not None and (is_final or turn.is_stopped(ended)):
            self._ends[task] = ended
            return
        # It was killed, or its disk is full. Of one that was killed, the step still runs.
        state = {0: "COMPLETED", EXIT_STOPPED: "STOPPED"}.get(code, "FAILED")
        status = code if code >= 0 else 128 - code
        killed = Failure(None, self._env.get("SLURMD_NODENAME", ""), status, AGENT_KILLED, Kind.NODE)
        why, then = (killed if code < 0 else None), Then.REQUEUE if code == EXIT_STOPPED else Then.END
        begun = [one.number for one in journal.starts(self._folder(task)) if one.job == self._name(task)]
        start = begun[-1] if begun else turn.starts - 1
        self._note(task, Outcome(self._name(task), start, state, status, why, then=then))
        for pid in processes.children(os.getpid()):
            if pid not in self._running:
                signals.send(pid, signal.SIGTERM)


def _is_elsewhere(folder: Path) -> bool:
    """Whether a task's run directory is gone, or has become another job's by `submit --resume`."""
    try:
        return "array_task" not in spec_file.raw(folder)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # it can't be read now
        return False
