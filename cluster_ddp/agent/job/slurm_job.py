"""A job of Slurm, on its batch host: starts the ranks, says how they ended, and has the job requeued if it may be."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent import channel, grid, notes, outcome, place, threads
from cluster_ddp.agent.job import ranks_and_gpus, report, requeue, step
from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.job.requeue import Policy, Requeue
from cluster_ddp.agent.notes import Notes
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.outcome import Outcome
from cluster_ddp.agent.secret import Key
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.keeper import Keeper
from cluster_ddp.contract import RESTART, Env
from cluster_ddp.errors import SpecError

_ASK_S = 60.0
# How long to wait, after srun has ended, for the last words of tasks.
_LAST_WORDS_S = 3.0
# What srun passes on to its tasks; HUP and QUIT make it kill them. TERM is final: it ends this process. Ctrl-C reaches
# srun, too, which asks what it means.
_HELD = signals.WARNINGS
# How long to wait for the first words of tasks before a warning is passed on: those that have not begun miss it.
_FIRST_WORDS_S = 30.0


class Job:
    """One start of a job of Slurm.

    Args:
        options: of the job.
        env: the environment of the batch script, or of a shell of salloc, completed.
        is_on_node: whether this process is on the job's first node, as a batch script is.

    Raises:
        ClusterDDPError: the environment contradicts itself, or all ports for the rendezvous are in use.
    """

    def __init__(self, options: Options, env: Mapping[str, str], *, is_on_node: bool = True) -> None:
        self.label = requeue.label(env)
        self.folder = place.run_dir(options, self.label)
        self.options = options._replace(command=tuple(grid.filled(options.command, options.grid, env)))
        self.added = place.on_slurm(options, env, self.label)
        """Variables that the tasks get beside those of the batch script."""
        self.env = {**env, **self.added}
        self.size = place.shape(options, env)
        # Without --run-dir, a script may have set the variable itself: the ranks' records are there, but no logs.
        self._records = self.folder or (Path(env[Env.RUN_DIR]) if env.get(Env.RUN_DIR) else None)
        self._is_on_node = is_on_node
        self._restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
        self._tasks = self.size.world_size if options.launcher == "srun" else self.size.nodes
        self._early: list[int] = []  # signals that came before the ranks were started

    def run(self) -> int:
        """Start the ranks, wait for their end, and do what follows from it. Returns the exit status.

        Raises:
            SpecError: srun would refuse to start so many ranks, or is not there.
        """
        if self._restarts:
            report.say(f"{RESTART}{self._restarts} of job {self.env['SLURM_JOB_ID']}.")
        if remark := ranks_and_gpus.remark(self.size, self.options):
            report.say(remark)
        if shutil.which("srun", path=self.env.get("PATH")) is None:
            hint = "after module purge, load Slurm's module again; or extend the PATH"
            raise SpecError("Starting the ranks of the job:", "srun is not on the PATH.", hint)
        policy = Policy(self.options.max_requeues, self.options.requeue_on_failure, self.options.requeue_elsewhere)
        requeuing = Requeue(policy, self.env, self._records)
        requeuing.begin()
        for number in _HELD:
            signal.signal(number, lambda number, frame: self._early.append(number))
        with notes.folder() as folder, self._job_times(folder / "job-times"):
            _leave_nothing(folder, ranks_too=self.env.get("ENVIRONMENT") != "BATCH")
            self.env |= step.staged(self.options, self.size, self.env)
            hearing = Hearing(self.options.launcher, self.size.world_size, self.folder, tasks=self._tasks)
            status = self._start(hearing, Notes(folder))
        ended = hearing.judge(Outcome(self.label, self._restarts, "COMPLETED", status))
        report.show(ended, hearing.log_of(ended.first), self.env)
        step.clean_up(self.options, self.env, ended.status)
        status = status if status == 0 else ended.status
        asking = functools.partial(self._note, ended._replace(requeued=True))
        if not requeuing.after(status, stopped=ended.state == "STOPPED", asking=asking):
            self._note(ended)
        report.show_how_to_resume(ended.status, self.env)
        return ended.status

    def _note(self, ended: Outcome) -> None:
        if self._records is not None:
            with contextlib.suppress(OSError):  # a full disk must not cost the requeue
                outcome.write(self._records, ended, shared=self.options.share)

    def command(self, *, ignore_warnings: bool = False) -> list[str]:
        """Return the command that starts the tasks; see `task.run`."""
        return step.srun(self.options, self.size, self.folder, ignore_warnings=ignore_warnings)

    def _start(self, hearing: Hearing, noted: Notes) -> int:
        """Start the tasks and wait for their end. Returns srun's exit status."""
        ignore_warnings, ports = step.configuration(self.env)
        key = Key.of_job(self.env)
        with contextlib.closing(channel.Server(channel.listen(ports), key, hearing.hear, hearing.gone)) as server:
            keeper = Keeper(noted, lambda end: None, held=_HELD, takers=self._srun_if_ready(hearing))
            signal.signal(signal.SIGINT, lambda number, frame: None)
            # Nodes may not know a login node by its name; Slurm tells each task where srun was started.
            self.env[Env.CHANNEL] = f"{self.env['MASTER_ADDR'] if self._is_on_node else ''}:{server.port}"
            command = self.command(ignore_warnings=ignore_warnings)
            keeper.start(None, command, step.step_env(self.options, self.size, self.env))
            _allow_many_files()
            for number in self._early:
                keeper.received(signal.Signals(number))
            status = keeper.keep()
            server.drain(_LAST_WORDS_S)
        return status

    def _srun_if_ready(self, hearing: Hearing) -> Callable[[int, int], list[int]]:
        """Return who takes a warning: srun, when it waits for signals, and its tasks have begun."""
        at_the_latest = time.monotonic() + _FIRST_WORDS_S

        def takers(srun: int, number: int) -> list[int]:
            are_ready = hearing.all_have_begun or time.monotonic() > at_the_latest
            waits = processes.blocks(srun, number) or processes.catches(srun, number)
            return [srun] if are_ready and waits else []

        return takers

    @contextlib.contextmanager
    def _job_times(self, path: Path) -> Iterator[None]:
        """During the body, ask Slurm for the job's start and end, which may change; rank 0 reads the answer."""
        over = threading.Event()
        said = requeue.ask_times(self.label, self.env, tries=3)
        if times := requeue.parse_times(said):
            self.env |= {"SLURM_JOB_START_TIME": str(times[0]), "SLURM_JOB_END_TIME": str(times[1])}
        self.env[Env.JOB_TIMES] = str(path)

        def write(answer: str) -> None:
            with contextlib.suppress(OSError):  # a full disk: the ranks know the times of the start
                path.write_text(f"{answer}\n")

        def ask() -> None:
            while not over.wait(_ASK_S):
                if answer := requeue.ask_times(self.label, self.env):
                    write(answer)

        write(said)
        threads.start(ask, "times")
        try:
            yield
        finally:
            over.set()


def _leave_nothing(folder: Path, *, ranks_too: bool) -> None:
    """TERM ends this process as it did before, but removes a folder first.

    Args:
        folder: to remove.
        ranks_too: whether srun gets TERM, too, and kills the ranks. Of a batch job Slurm itself ends them, and gives
            them more time; an allocation of salloc goes on.
    """

    def end(number: int, frame: object) -> None:
        for child in processes.children(os.getpid()) if ranks_too else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def _allow_many_files() -> None:
    """Each task's connection is an open file. srun has started already: the ranks keep the limit that they had."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
