"""What the job's agent tells the agent of a task: to end its command, to start it again, or that the job is over.

So a restart needs no new step of Slurm where all nodes are still there.
"""

from __future__ import annotations

import collections
import socket
import threading
from collections.abc import Callable

from cluster_ddp.agent import threads
from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.channel.lines import Message

_LONGEST_WAIT_S = 3600.0

OVER: Message = {"kind": "over"}
CUT: Message = {"kind": "cut"}


class Orders:
    """Hears the job in a thread.

    If the job's agent has ended, the job is over: Slurm ends what still runs, as it ends other jobs. If it is silent,
    this node is cut off, or the batch host: ranks may have started elsewhere, so those here must end.

    Args:
        client: connected to the job.
        step: number of the start with which this step began, or its name: orders for others are not for this task.
        wake: is called in that thread after each order.
    """

    def __init__(self, client: Client, step: int | str, wake: Callable[[], None]) -> None:
        self._client, self._step, self._wake = client, step, wake
        self._given: collections.deque[Message] = collections.deque()
        self._changed = threading.Condition()
        client.notice()
        threads.start(self._hear, "orders")

    @property
    def must_end(self) -> bool:
        """Whether a command that still runs is to be killed."""
        with self._changed:
            return any(order["kind"] in ("stop", "cut") for order in self._given)

    def wait(self) -> Message:
        """Wait for the next order."""
        with self._changed:
            self._changed.wait_for(lambda: self._given)
            return self._given.popleft()

    def _hear(self) -> None:
        is_over = False
        while not is_over:
            try:
                order = self._client.hear(_LONGEST_WAIT_S)
            except (ConnectionError, ValueError):
                order, is_over = OVER, True
            except OSError as error:
                if isinstance(error, socket.timeout) and error.errno is None:  # nothing was said for an hour
                    continue
                order, is_over = CUT, True  # ETIMEDOUT, EHOSTUNREACH
            if is_over or order.get("step") == self._step:
                with self._changed:
                    self._given.append(order)
                    self._changed.notify_all()
                self._wake()
