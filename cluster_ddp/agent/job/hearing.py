"""What the tasks of a start have said: how their ranks ended, in the order of arrival, and that they train alone."""

from __future__ import annotations

import threading
from pathlib import Path

from cluster_ddp.agent import log_words, outcome
from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.job import report
from cluster_ddp.agent.outcome import End, Failure, Outcome
from cluster_ddp.contract import EXIT_STOPPED, File

_ALONE = """\
warning: None of the {} ranks of this job has joined a process group so far, and none is connected to another one.
  If they were to train together, each trains alone, on all data.
  Hint: let the script join the process group: cluster_ddp.distributed(), or torch.distributed.init_process_group()"""


class Hearing:
    """Hears the tasks of one start. `hear` and `gone` are called in the thread of the channel.

    Args:
        launcher: of the ranks.
        world_size: number of ranks.
        folder: the run directory, with the logs of tasks; None if there is none.
        tasks: number of tasks that srun starts; 0 on this machine.
    """

    def __init__(self, launcher: str, world_size: int, folder: Path | None = None, *, tasks: int = 0) -> None:
        self._launcher, self._world_size, self._folder, self._tasks = launcher, world_size, folder, tasks
        self._logs = report.Logs(folder)
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._on: dict[str, int] = {}  # host -> the number of a task there
        self._ends: list[End] = []
        self._ended: set[tuple[int | None, str]] = set()
        self._gone: list[End] = []
        self._alone: set[int] = set()

    @property
    def all_have_begun(self) -> bool:
        """Whether all tasks have said that they begin."""
        return len(self._begun) >= self._tasks

    @property
    def was_stopped(self) -> bool:
        """Whether a rank was stopped in time."""
        with self._lock:
            return any(end.was_stopped or end.status == EXIT_STOPPED for end in self._ends)

    def judge(self, ended: Outcome) -> Outcome:
        """Say how the start ended, by what the tasks have said; where they are silent, by what srun has.

        Args:
            ended: with the status of srun, or of all tasks together.
        """
        if self.was_stopped or ended.status == EXIT_STOPPED:
            return ended._replace(state="STOPPED", status=EXIT_STOPPED)
        if ended.status == 0 and self.all_have_begun:
            return ended
        said = self._logs.of_job()
        first = log_words.not_launched(said) if ended.status == 0 else self._first_failure(said)
        if first is not None:
            first = log_words.with_memory(first, said)
            ended = ended._replace(status=first.status, first=first)
        return ended._replace(state="FAILED", lost_nodes=log_words.lost_nodes(said)) if ended.status else ended

    def log_of(self, one: End | Failure | None) -> Path | None:
        """The log of a rank, under torchrun that of its node; None if it is the job's, or there is no rank."""
        if one is None:
            return None
        number = self._on.get(one.host) if self._launcher == "torchrun" else one.rank
        if number is None and not self._tasks:
            number = 0
        return None if self._folder is None or number is None else self._folder / File.TASK_LOG.format(number)

    def _first_failure(self, said: str) -> Failure | None:
        silent, of_ranks = None, self._launcher == "srun"
        if not self.all_have_begun:  # a node that can't start the agent, or a task that can't reach the job
            silent = log_words.srun_says(said, of_ranks=of_ranks, heard=self._begun) or log_words.not_launched(said)
        with self._lock:
            first = outcome.first_failure(self._ends, self._gone, silent, words_of=self._last_error)
        return first or log_words.srun_says(said, of_ranks=of_ranks)

    def _last_error(self, end: End) -> str:
        """For a script that does not use cluster_ddp, and a parent of ranks: the last error in its log."""
        path = self.log_of(end)
        return log_words.last_error(self._logs.of_job() if path is None else self._logs.of(path), end.rank)

    def hear(self, message: Message) -> None:
        """Take a message of a task."""
        with self._lock:
            if message["kind"] == "hello":
                if self._tasks and message["task"] is not None:
                    self._begun.add(int(message["task"]))
                    self._on[message["host"]] = int(message["task"])
            elif message["kind"] == "ended":
                self._ends.append(end := End(**{name: message[name] for name in End._fields}))
                self._ended.add((end.rank, end.host))
            elif message["kind"] == "alone":
                is_new = message["rank"] not in self._alone
                self._alone.add(message["rank"])
                if is_new and len(self._alone) == self._world_size:
                    report.say(_ALONE.format(self._world_size))

    def gone(self, hello: Message) -> None:
        """Note the ranks of a connection that has ended before it said how they ended."""
        with self._lock:
            ranks = hello["ranks"] or [None]  # around the parent of several ranks
            lost = [rank for rank in ranks if (rank, hello["host"]) not in self._ended]
            self._gone += [End(rank, hello["host"], outcome.KILL) for rank in lost]
