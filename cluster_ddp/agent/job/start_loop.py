"""The starts of a job's ranks: each begins, ends, is judged, and it is decided what follows. On Slurm and here."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from cluster_ddp.agent.channel import Key
from cluster_ddp.agent.job import job_log, srun_step
from cluster_ddp.agent.job.restart.failures import Decision, History
from cluster_ddp.agent.job.restart.job_nodes import UNKNOWN, Nodes
from cluster_ddp.agent.job.restart.recovery import Recovery
from cluster_ddp.agent.job.srun_step import On
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.job.tasks import Tasks
from cluster_ddp.agent.launch_env import Shape
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.supervision.supervisor import Supervisor
from cluster_ddp.run import fence
from cluster_ddp.run.names import Env, Then
from cluster_ddp.run.outcome import Outcome


class BaseJob:
    """What the loop asks of a job: where it runs decides. The answers here are those of a job without nodes."""

    shares_nodes: ClassVar[bool] = False
    """Whether others of our jobs are on its nodes: it has a part of a job of Slurm's."""
    options: AgentOptions
    size: Shape
    label: str
    """Its id, of an array's task with its number: 12, or 12_3."""
    job: str
    """Its label; of a chain, whose jobs have one label, the id that Slurm has given to this one."""
    folder: Path | None
    """The run directory; None if it has none."""
    fenced_dir: Path | None = None
    """The run directory that is to be kept from the ranks of earlier starts, which may live on other nodes."""
    env: dict[str, str]
    """The environment of the ranks."""
    added: dict[str, str]
    """What it has beside that of this process."""
    requeues: int
    """How often the job was started again after a stop in time, or by Slurm."""
    early: Sequence[int] = ()
    """Signals that came before the ranks were started."""
    slurmd_port: int = 0
    """Where Slurm's daemons listen."""
    nodes: Nodes = UNKNOWN
    """Its nodes, if restarts need to know them."""

    def run(self) -> int:
        """Start the ranks, wait for their end, and do what follows from it. Returns the exit status."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Return the command that starts the tasks, or one of them."""
        raise NotImplementedError

    def listen(self) -> tuple[socket.socket, str]:
        """Return a socket that listens for the tasks, and its host as they name it."""
        raise NotImplementedError

    def begin_start(self, on: On, number: int) -> dict[str, str]:
        """Begin a start, of this number. Returns its variables, for the ranks' environment."""
        raise NotImplementedError

    def noted(self, on: On, nodes: Nodes) -> dict[str, Any]:
        """Return what the journal notes of a start; `nodes` are those that the job has now."""
        return {}

    def start_step(self, on: On, reports: TaskReports) -> Supervisor:
        """Start the agents of the tasks. Returns who keeps them."""
        raise NotImplementedError

    def look(self, step: str, send: Callable[[signal.Signals], object], end: Callable[[], object]) -> float:
        """Look at the running step, and do what is due. Returns after how many seconds to look again.

        Args:
            step: its id; empty while its tasks have not begun.
            send: sends a signal to all its tasks.
            end: ends it by TERM.
        """
        return float("inf")

    def judged(self, ended: Outcome) -> Outcome:
        """Return how a start ended: if it was ended by `look`, that counts."""
        return ended

    def why_unfinished(self, ended: Outcome) -> str:
        """Return why the job has not ended for good, although this process ends; empty if it has."""
        return ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for whoever started it."""
        return False

    def why_superseded(self) -> str:
        """Why Slurm, which is asked, considers this start of the job over; empty if not, or if it does not answer."""
        return ""


class Starts:
    """The starts of a job's ranks, as often as they may be."""

    def __init__(self, job: BaseJob, history: History) -> None:
        self._job = job
        self._history = history
        self.number = job.requeues + history.restarts
        """Number of starts before this one."""
        self.recovery = Recovery(job.options, job.env, history, job.nodes, job.slurmd_port, self._examine)
        listener, host = job.listen()
        self._tasks = Tasks(
            listener,
            Key.of_job(job.env),
            stays=job.options.restarts > 0,
            note_gone=self.recovery.note_gone,
            look=job.look,
        )
        job.env[Env.CHANNEL] = f"{host}:{self._tasks.port}"
        self._on = On(self.recovery.nodes.training)
        """Where the next one begins."""
        self._is_in_step = False  # whether it does so in the step that runs
        self._left_logs: list[Path] = []  # of ranks that nobody can end

    @property
    def has_killed(self) -> bool:
        """Whether tasks had to be killed: what they have started may still run."""
        return self._tasks.has_killed

    def run(self) -> Outcome:
        """Start the ranks, again as often as they may be. Returns how the last start ended."""
        with contextlib.closing(self._tasks):
            if spares := self.recovery.nodes.spares:
                env = srun_step.step_env(self._job.options, self._job.size, self._job.env, On(spares))
                self._tasks.watch(srun_step.spares(self._job.options, self._job.size, spares), env, spares)
            while True:
                self._begin()
                self.tasks_status = self._tasks.wait()
                ended = self._judge()
                self.follows = self._decide(ended)
                if self.follows.then != Then.RESTART:
                    return ended
                self.number += 1

    def _begin(self) -> None:
        """Begin a start: in the step that runs, or in a new one."""
        job, on, launcher = self._job, self._on, self._job.options.launcher
        size = on.of(job.size)
        self._reports = TaskReports(launcher, size.world_size, job.folder, tasks=size.tasks(launcher))
        job.env.update(job.begin_start(on, self.number))
        if (most := self._history.micro_batch) is not None:
            job.env[Env.MICRO_BATCH] = str(most)
        job.env[Env.START_ID] = self._history.begin(self.number, **job.noted(on, self.recovery.nodes))
        if self._is_in_step:
            self._tasks.again(self._reports, job.env)
            return
        if job.fenced_dir is not None:
            with contextlib.suppress(OSError):  # such as on a full disk
                fence.take_over(job.fenced_dir, job.label, self.number, logs=self._left_logs)
        self._tasks.start(lambda: job.start_step(on, self._reports), self._reports, self.number, job.early)
        job.early = ()

    def _examine(self, nodes: Sequence[str]) -> Mapping[str, str]:
        return self._tasks.examine(nodes)

    def _judge(self) -> Outcome:
        """Say how a start has ended."""
        now_s = round(time.time(), 3)
        ended = self._reports.judge(Outcome(self._job.label, self.number, "COMPLETED", self.tasks_status, time=now_s))
        ended = ended._replace(lost_nodes=self.recovery.lost(self._reports) or ended.lost_nodes)
        ended = self._job.judged(ended)
        job_log.show(ended, self._reports.log_of(ended.first), self._job.env)
        return ended

    def _is_over(self) -> bool:
        """Whether this start is over for Slurm, too. It may be away: what needs no new step does not ask it."""
        asks = self._tasks.stays and not self._tasks.can_start_again
        return bool(self._job.why_superseded()) if asks else self._job.is_over

    def _decide(self, ended: Outcome) -> Decision:
        """Return what follows, and note it; end the step, unless the next start begins in it.

        What follows a start that was stopped in time is not known yet.
        """
        follows = Decision(Then.END)
        if ended.state == "FAILED" and not self._is_over():
            follows = self.recovery.decide(ended, self._reports)
        elif ended.state != "STOPPED" and not self._job.why_unfinished(ended):
            self._history.end(ended)
        self._left_logs = self._reports.logs_of_gone()
        training = self.recovery.nodes.training
        self._is_in_step = follows.then == Then.RESTART and self._tasks.can_start_again and training == self._on.nodes
        if not self._is_in_step:
            self._tasks.end()
        self._on = On(training, is_beside=not self._job.shares_nodes, is_first=False)
        return follows
