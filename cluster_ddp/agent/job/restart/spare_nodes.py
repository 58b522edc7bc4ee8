"""What is known of the spares; and a step that waits on them for the next start, made before a silent node is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence

from cluster_ddp import processes
from cluster_ddp.agent.channel import Message
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
    """A step of so many agents that wait with torch imported, under a name that no other has.

    `hear` and `gone` may be called in any thread.
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
        """Wait some seconds until all agents wait. Returns whether the step can be that of a start on these nodes."""
        deadline = time.monotonic() + _READY_S
        is_it = (number, tuple(nodes)) == (self._number, self._nodes)
        while is_it and time.monotonic() < deadline and os.waitid(os.P_PID, self.srun, _HAS_ENDED) is None:
            with self._changed:
                if self._changed.wait_for(lambda: len(self._waiting) == self._tasks, _POLL_S):
                    return True
        return False

    def end(self) -> None:
        """End the step, in the background: its agents have been told. Only those that stay are killed, as srun says."""
        processes.start_thread(self._end, "standby")

    def _end(self) -> None:
        deadline = time.monotonic() + _PEACE_S
        while os.waitid(os.P_PID, self.srun, _HAS_ENDED) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.srun, signal.SIGTERM)
        os.waitpid(self.srun, 0)


# How long a spare may take to examine its node.
_EXAMINED_S = 30.0
_LOST = "Its connection is lost."
_SILENT = f"It did not examine itself within {_EXAMINED_S:g} s."


class Spares:
    """What is known of the spares. All methods may be called in any thread."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self._changed = threading.Condition()
        self._faults: dict[str, str | None] = dict.fromkeys(nodes, "")
        self._lost: list[str] = []

    @property
    def lost(self) -> list[str]:
        """Those whose connection has ended."""
        with self._changed:
            return list(self._lost)

    def hear(self, message: Message) -> None:
        """Take a message of a spare."""
        if message["kind"] == "examined":
            with self._changed:
                self._faults[message["host"]] = message["fault"]
                self._changed.notify_all()

    def gone(self, hello: Message) -> None:
        """Note that a spare's connection has ended."""
        with self._changed:
            self._lost.append(hello["host"])
            self._faults[hello["host"]] = _LOST
            self._changed.notify_all()

    def ask(self, nodes: Sequence[str]) -> None:
        """Forget earlier answers of spares."""
        with self._changed:
            self._faults.update({node: None for node in nodes if node not in self._lost})

    def answers(self, nodes: Sequence[str]) -> dict[str, str]:
        """Wait for the answers of spares. Returns node -> what is wrong, for those that can't be used."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._faults[node] is not None for node in nodes), _EXAMINED_S)
            found = {node: _SILENT if (fault := self._faults[node]) is None else fault for node in nodes}
        return {node: fault for node, fault in found.items() if fault}
