"""What the tasks of a start have said: how their ranks ended, in the order of arrival, and that they train alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from cluster_ddp.agent import first_failure
from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.job import job_log
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.supervision.supervisor import PATIENCE_S
from cluster_ddp.run import outcome
from cluster_ddp.run.names import EXIT_STOPPED, File
from cluster_ddp.run.outcome import Failure, Outcome

# Seconds that other ranks have to say how they fail, after the first one: after an exception, after a signal.
_WORDS_S, _KILLED_S = 2.0, 0.5
# How long a job is suspended at least if ranks may time out of it; how soon after its resume they have.
_SUSPENDED_S, _RESUMED_S = 240.0, 120.0
_NEVER = float("inf")

_ALONE = """\
warning: None of the {} ranks of this job has joined a process group so far, and none is connected to another one.
  If they were to train together, each trains alone, on all data.
  Hint: let the script join the process group: cluster_ddp.distributed(), or torch.distributed.init_process_group()"""


class TaskReports:
    """Hears the tasks of one start. `hear` and `gone` are called in the thread of the channel.

    Args:
        launcher: of the ranks.
        world_size: number of ranks.
        folder: the run directory, with the logs of tasks; None if there is none.
        tasks: number of tasks of the step; 0 if it is not known.
    """

    def __init__(self, launcher: str, world_size: int, folder: Path | None = None, *, tasks: int = 0) -> None:
        self.began = time.time()
        """When the start began, in seconds of UNIX time."""
        self.step_id = ""
        """The id of the step, once a task has said that it begins."""
        self._launcher, self._world_size, self._folder, self._tasks = launcher, world_size, folder, tasks
        self._logs = job_log.Logs(folder)
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._ends: list[End] = []
        self._ended: set[tuple[int, str]] = set()
        self._untold: list[End] = []  # of ranks whose agent went before it told their ends
        self._alone: set[int] = set()
        self._idle: dict[int, int] = {}  # number of a task -> its exit status
        self._gone: dict[int, Message] = {}  # number of a task whose agent is gone, if those stay -> its hello
        self._over_at, self._resumed_at = _NEVER, -_NEVER
        self._is_closed = False
        self.is_step_ending = False
        """Whether the agent of a task has got TERM: Slurm ends the step there, and kills what is left."""

    @property
    def all_have_begun(self) -> bool:
        """Whether all tasks have said that they begin."""
        with self._lock:
            return len(self._begun) >= self._tasks

    @property
    def was_stopped(self) -> bool:
        """Whether a rank was stopped in time."""
        with self._lock:
            return any(end.was_stopped or end.status == EXIT_STOPPED for end in self._ends)

    @property
    def has_begun(self) -> bool:
        """Whether any task has said that it begins."""
        with self._lock:
            return bool(self._begun)

    @property
    def are_idle(self) -> bool:
        """Whether all commands have ended, and their agents wait; those that are gone count."""
        with self._lock:
            return len(self._idle.keys() | self._gone.keys()) >= self._tasks

    @property
    def hosts_of_gone(self) -> list[str]:
        """Hosts where an agent is gone."""
        with self._lock:
            return [*dict.fromkeys(hello["host"] for hello in self._gone.values())]

    @property
    def statuses(self) -> list[int]:
        """The exit statuses other than 0 of tasks, in the order in which they came; of those without an agent: KILL."""
        with self._lock:
            gone = [outcome.KILL for task in self._gone if task not in self._idle]
            return [*filter(None, self._idle.values()), *gone]

    def note_suspension(self, missed_s: float) -> None:
        """Note that the job, which was suspended for so many seconds, was resumed now."""
        if missed_s >= _SUSPENDED_S:
            self._resumed_at = time.monotonic()

    @property
    def is_just_resumed(self) -> bool:
        """Whether the job was suspended for minutes until a moment ago."""
        return time.monotonic() - self._resumed_at < _RESUMED_S

    def due_s(self, now: float) -> float:
        """Return in how many seconds the start may be over: others may still say why a first rank failed."""
        return self._over_at - now

    def is_over(self, now: float) -> bool:
        """Whether the start is over: all commands have ended, or one has failed some time ago."""
        return self.are_idle or now >= self._over_at

    def ignore_further_ends(self) -> None:
        """Hear no more: what comes now are ranks that were killed because of a failure."""
        with self._lock:
            self._is_closed = True

    def failed_everywhere(self, words: str) -> bool:
        """Whether all ranks have failed with these words, but for their numbers."""
        with self._lock:
            same = first_failure.without_numbers(words)
            said = {end.rank: first_failure.without_numbers(end.words or self._last_error(end)) for end in self._ends}
            ranks = [rank for rank, one in said.items() if one == same]
            return bool(words) and len(ranks) == self._world_size

    def end_of(self, one: Failure | None) -> End | None:
        """What the rank that failed has said; None if it has said nothing."""
        with self._lock:
            return next((end for end in self._ends if one is not None and end.rank == one.rank and end.status), None)

    def logs_of_gone(self) -> list[Path]:
        """Logs of ranks whose agents are gone: their nodes may be cut off, and still write."""
        with self._lock:
            ranks = [rank for hello in self._gone.values() for rank in hello["ranks"]]
        return [] if self._folder is None else [self._folder / File.TASK_LOG.format(rank) for rank in ranks]

    def judge(self, ended: Outcome) -> Outcome:
        """Say how the start ended, by what the tasks have said; where they are silent, by what srun has.

        What is given has the status of srun, or of all tasks together.
        """
        if self.was_stopped or ended.status == EXIT_STOPPED:
            return ended._replace(state="STOPPED", status=EXIT_STOPPED)
        if ended.status == 0 and self.all_have_begun:
            return ended
        said = self._logs.of_job()
        first = first_failure.not_launched(said) if ended.status == 0 else self._first_failure(said)
        if first is not None:
            first = first_failure.with_memory(first, said)
            ended = ended._replace(status=first.status, first=first)
        return ended._replace(state="FAILED", lost_nodes=first_failure.lost_nodes(said)) if ended.status else ended

    def log_of(self, one: End | Failure | None) -> Path | None:
        """The log of a rank; None if it is the job's, or there is no rank."""
        if one is None:
            return None
        return None if self._folder is None or one.rank is None else self._folder / File.TASK_LOG.format(one.rank)

    def _first_failure(self, said: str) -> Failure | None:
        silent, of_ranks = None, self._launcher == "srun"
        if not self.all_have_begun:  # a node that can't start the agent, or a task that can't reach the job
            with self._lock:
                heard = set(self._begun)
            silent = first_failure.by_srun(said, of_ranks=of_ranks, heard=heard) or first_failure.not_launched(said)
        with self._lock:
            first = first_failure.by_ends(self._ends, self._untold, silent, words_of=self._last_error)
        return first or first_failure.by_srun(said, of_ranks=of_ranks)

    def _last_error(self, end: End) -> str:
        """For a script that does not use cluster_ddp: the last error in its log."""
        path = self.log_of(end)
        return first_failure.last_error(self._logs.of_job() if path is None else self._logs.of(path), end.rank)

    def hear(self, message: Message) -> None:
        """Take a message of a task."""
        with self._lock:
            if message["kind"] == "idle":
                self._idle[int(message["task"])] = message["status"]
                self.is_step_ending |= message["got_term"]
            elif self._is_closed:
                pass
            elif message["kind"] == "hello":
                if self._tasks:
                    self._begun.add(int(message["task"]))
                    self.step_id = message.get("step_id") or self.step_id
            elif message["kind"] == "ended":
                # A launcher of an older version, in a container, says less.
                said = {name: message[name] for name in End._fields if name in message}
                self._ends.append(end := End(message["rank"], message["host"], message["status"])._replace(**said))
                self._ended.add((end.rank, end.host))
                self._note_over(end)
            elif message["kind"] == "alone":
                is_new = message["rank"] not in self._alone
                self._alone.add(message["rank"])
                if is_new and len(self._alone) == self._world_size:
                    job_log.say(_ALONE.format(self._world_size))

    def _note_over(self, end: End) -> None:
        """Note when the start is over because of an end."""
        wait_s = PATIENCE_S if end.was_stopped or end.status == EXIT_STOPPED else _WORDS_S
        if end.status > 128 or end.speaks_for_all:  # it has said all
            wait_s = _KILLED_S
        if end.status:
            self._over_at = min(self._over_at, time.monotonic() + wait_s)

    def gone(self, hello: Message) -> None:
        """Note the ranks of a connection that has ended before it said how they ended."""
        with self._lock:
            untold = [rank for rank in hello["ranks"] if (rank, hello["host"]) not in self._ended]
            self._untold += [End(rank, hello["host"], outcome.KILL) for rank in untold]
            if hello.get("stays"):
                self._gone[int(hello["task"])] = hello
                self._over_at = min(self._over_at, time.monotonic() + _KILLED_S)
