"""A step whose agents wait for the next start, with torch imported: made while a node is silent, before it is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

from cluster_ddp.agent import threads
from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.spawn import spawn
from cluster_ddp.protocol import Env

# How long its agents may take to begin.
_READY_S = 10.0
# How long they may take to end.
_PEACE_S = 5.0
_POLL_S = 0.1
_HAS_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Standby:
    """The step. `hear` and `gone` may be called in any thread.

    Args:
        mark: its name, which no other step has.
        command: srun's.
        env: srun's environment, with the number of the next start.
        nodes: where it runs.
        tasks: how many agents it has.
    """

    def __init__(
        self, mark: str, command: Sequence[str], env: Mapping[str, str], nodes: Sequence[str], tasks: int
    ) -> None:
        self.mark, self._number, self._nodes, self._tasks = mark, int(env[Env.START]), tuple(nodes), tasks
        self._changed, self._waiting = threading.Condition(), set[str]()
        self.gone_since: list[Message] = []
        """The first words of agents that are gone."""
        self.srun = spawn(command, env, default=signals.PASSED_ON)
        """Its process id."""

    def hear(self, message: Message) -> None:
        """Take the first word of an agent that waits."""
        with self._changed:
            self._waiting.add(message["task"])
            self._changed.notify_all()

    def gone(self, hello: Message) -> None:
        """Note that an agent's connection has ended."""
        with self._changed:
            self._waiting.discard(hello["task"])
            self.gone_since.append(hello)

    def is_ready_for(self, number: int, nodes: Sequence[str]) -> bool:
        """Wait until all agents wait, some seconds at most. Returns whether the step can be that of a start.

        Args:
            number: of the start.
            nodes: where it is to be.
        """
        deadline = time.monotonic() + _READY_S
        is_it = (number, tuple(nodes)) == (self._number, self._nodes)
        while is_it and time.monotonic() < deadline and os.waitid(os.P_PID, self.srun, _HAS_ENDED) is None:
            with self._changed:
                if self._changed.wait_for(lambda: len(self._waiting) == self._tasks, _POLL_S):
                    return True
        return False

    def end(self) -> None:
        """End the step, in the background: its agents have been told. Only those that stay are killed, as srun says."""
        threads.start(self._end, "standby")

    def _end(self) -> None:
        deadline = time.monotonic() + _PEACE_S
        while os.waitid(os.P_PID, self.srun, _HAS_ENDED) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.srun, signal.SIGTERM)
        os.waitpid(self.srun, 0)
