"""What the tasks of a start have said: how their ranks ended, in the order of arrival, and that they train alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cluster_ddp.agent import outcome
from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.job import report
from cluster_ddp.agent.outcome import End, Failure
from cluster_ddp.contract import EXIT_STOPPED

_ALONE = """\
warning: None of the {} ranks of this job has joined a process group so far, and none is connected to another one.
  If they were to train together, each trains alone, on all data.
  Hint: let the script join the process group: cluster_ddp.distributed(), or torch.distributed.init_process_group()"""


class Hearing:
    """Hears the tasks of one start. `hear` and `gone` are called in the thread of the channel.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._ends: list[End] = []
        self._gone: list[End] = []
        self._alone: set[int] = set()
        self.tasks_begun = 0
        """Number of tasks that have said that they begin."""
        self.tasks: dict[int, int] = {}
        """Rank -> number of the task that started it."""

    @property
    def was_stopped(self) -> bool:
        """Whether a rank was stopped in time."""
        with self._lock:
            return any(end.was_stopped or end.status == EXIT_STOPPED for end in self._ends)

    def first_failure(self, words_of: Callable[[End], str]) -> Failure | None:
        """Return what failed first; see `outcome.first_failure`."""
        with self._lock:
            return outcome.first_failure(self._ends, self._gone, words_of=words_of)

    def hear(self, message: Message) -> None:
        """Take a message of a task."""
        with self._lock:
            if message["kind"] == "hello":
                self.tasks_begun += 1
                self.tasks.update({rank: int(message["task"]) for rank in message["ranks"] if message["task"]})
            elif message["kind"] == "ended":
                self._ends.append(End(**{name: message[name] for name in End._fields}))
            elif message["kind"] == "alone":
                is_new = message["rank"] not in self._alone
                self._alone.add(message["rank"])
                if is_new and len(self._alone) == self._world_size:
                    report.say(_ALONE.format(self._world_size))

    def gone(self, hello: Message) -> None:
        """Note the ranks of a connection that has ended before it said how they ended."""
        with self._lock:
            ended, host = {(end.rank, end.host) for end in self._ends}, hello["host"]
            for rank in hello["ranks"] or [None]:  # around the parent of several ranks
                if (rank, host) not in ended:
                    self._gone.append(End(rank, host, outcome.KILL))
