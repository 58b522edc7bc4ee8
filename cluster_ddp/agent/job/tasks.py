"""The tasks of a job: their step, the channel on which their agents speak, and their orders."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from cluster_ddp import processes
from cluster_ddp.agent.channel import Key, Message
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.agent.job.restart.job_nodes import Ending, Spares
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.supervision.spawn import allow_many_files, spawn
from cluster_ddp.agent.supervision.supervisor import Supervisor, status_of, wake
from cluster_ddp.agent.task.orders import SPARE
from cluster_ddp.run.names import Env
from cluster_ddp.run.outcome import TERM

# Variables that differ between starts in one step.
_OF_START = (Env.START, Env.START_ID, Env.MICRO_BATCH, "MASTER_ADDR", "MASTER_PORT")
# How long to wait, after srun has ended, for the last words of tasks.
_LAST_WORDS_S = 3.0
# How long srun may take to end: after its tasks; and by TERM. Then others start beside it.
_IN_PEACE_S, _END_S = 30.0, 0.3
# Slurm ends a job by TERM to each of its steps. How much later than the tasks this process may get it.
_TERM_S = 2.0
# How long killed ranks may take to be gone.
_KILLED_S = 5.0
# How often to look whether the job was suspended.
_SUSPENSIONS_S = 2.0


class Tasks:
    """The tasks of a job.

    Args:
        listener: a socket on which they are heard.
        key: the job's key.
        stays: whether the tasks' agents stay when their commands have ended, for another start.
        note_gone: is called with the spares whose agents are gone, after each event.
        look: is called with the step's id, what sends it a signal, and what ends it; see `BaseJob.look`.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        *,
        stays: bool = False,
        note_gone: Callable[[Sequence[str]], None] = lambda spares: None,
        look: Callable[[str, Callable[[signal.Signals], object], Callable[[], object]], float] | None = None,
    ) -> None:
        self._look, self._suspensions = look, processes.Suspensions()
        self.stays, self._note_gone = stays, note_gone
        self._spares = Spares()
        self._spares_srun: int | None = None
        self._has_lost = False  # whether an agent had gone before it was told
        self._first_start = self._start = -1
        self._server = Server(listener, key, self._hear, self._gone, notices=stays)

    @property
    def port(self) -> int:
        """The port of the channel."""
        return self._server.port

    def close(self) -> None:
        """End the channel, and with it the step of the spares: Slurm would kill it."""
        has_lost = self._has_lost or bool(self._spares.lost)
        self._server.close()
        if self._spares_srun is not None:
            ending = Ending(self._spares_srun)
            if not has_lost:  # srun waits long for a node that is lost
                ending.wait()

    def start(
        self, begin: Callable[[], Supervisor], reports: TaskReports, number: int, early: Sequence[int] = ()
    ) -> None:
        """Start a step, whose first start has this number. Signals that came before are passed on."""
        self._reports = reports
        self._first_start = self._start = number
        self._supervisor = begin()
        allow_many_files()
        for one in early:
            self._supervisor.pass_on(signal.Signals(one))

    def again(self, reports: TaskReports, env: Mapping[str, str]) -> None:
        """Let the step's agents start their commands again. See `start`."""
        self._reports, self._start = reports, int(env[Env.START])
        self._tell("again", env={name: env[name] for name in _OF_START if name in env})

    def wait(self) -> int:
        """Wait for the end of a start. Returns the exit status of its tasks, or srun's."""
        self._suspensions.missed_s()  # before was none
        status = self._supervisor.wait(self._due, until=lambda: self.stays and self._reports.is_over(time.monotonic()))
        if not self._supervisor.is_running:
            self._server.drain(_LAST_WORDS_S if not self.stays else 0.0)
            return status
        self._reports.ignore_further_ends()
        if not self._reports.are_idle:
            self._tell("stop")
            self._wait(_KILLED_S, idle=True)
        if TERM in self._reports.statuses:
            time.sleep(_TERM_S)
        return status_of(self._reports.statuses)

    @property
    def has_killed(self) -> bool:
        """Whether tasks had to be killed: what they have started may still run."""
        return self._supervisor.has_killed

    @property
    def can_start_again(self) -> bool:
        """Whether all agents of the step wait for another start, and Slurm lets them."""
        reports = self._reports
        waits = self._supervisor.is_running and reports.are_idle and not reports.hosts_of_gone
        return waits and not reports.is_step_ending

    def end(self) -> None:
        """End the step, if it still runs: the job is over, or its next start is on other nodes."""
        self._has_lost = bool(self._reports.hosts_of_gone)
        self._tell("over")
        if not self._has_lost:
            self._wait(_IN_PEACE_S)
        if self._supervisor.is_running:
            self._supervisor.end()
            self._wait(_END_S)

    def watch(self, command: Sequence[str], env: Mapping[str, str], nodes: Sequence[str]) -> None:
        """Start the step of the spares: srun's command and environment."""
        self._spares = Spares(nodes)
        self._spares_srun = spawn(command, env, default=signals.PASSED_ON)

    def examine(self, nodes: Sequence[str]) -> dict[str, str]:
        """Let spares examine themselves. Returns node -> what is wrong, for those that can't be used."""
        self._spares.ask(nodes)
        self._server.tell("examine", to=SPARE, nodes=[*nodes])
        return self._spares.answers(nodes)

    def _tell(self, kind: str, **fields: object) -> None:
        self._server.tell(kind, to=self._first_start, **fields)

    def _hear(self, message: Message) -> None:
        if listener := self._listener(message, is_ours=message.get("start") == self._start):
            listener.hear(message)
        wake()

    def _gone(self, hello: Message) -> None:
        is_ours = hello.get("start") in (self._first_start, self._start)
        if listener := self._listener(hello, is_ours=is_ours):
            listener.gone(hello)
        wake()

    def _listener(self, message: Message, *, is_ours: bool) -> Spares | TaskReports | None:
        """Return who hears a message, or of its sender's end; None: it is of a rank that was left behind."""
        if message.get("spare"):
            return self._spares
        return self._reports if is_ours else None

    def _due(self) -> float:
        """Look after limits and spares. Returns the seconds until the next look."""
        look_s = float("inf")
        if self._look is not None:
            look_s = self._look(self._reports.step_id, self._supervisor.pass_on, self._supervisor.end)
        if not self.stays:
            return look_s
        self._note_gone(self._spares.lost)
        self._reports.note_suspension(self._suspensions.missed_s())
        return min(look_s, self._reports.due_s(time.monotonic()), _SUSPENSIONS_S)

    def _wait(self, limit_s: float, *, idle: bool = False) -> None:
        """Wait for the end of srun, or until all agents are idle, at most so many seconds."""
        deadline = time.monotonic() + limit_s
        self._supervisor.wait(
            lambda: deadline - time.monotonic(),
            until=lambda: time.monotonic() >= deadline or (idle and self._reports.are_idle),
        )
