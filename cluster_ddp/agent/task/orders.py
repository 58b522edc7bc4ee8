"""What the job's agent tells the agent of a task: to end its command, to start it again, or that the job is over.

So a restart needs no new step of Slurm where all nodes are still there. The agent of a spare node examines it.
"""

from __future__ import annotations

import collections
import os
import socket
import threading
from collections.abc import Callable

from cluster_ddp import processes
from cluster_ddp.agent import launch_env
from cluster_ddp.agent.channel import Client, Message
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.agent.supervision import signals
from cluster_ddp.agent.task import python_module
from cluster_ddp.errors import one_line
from cluster_ddp.slurm.variables import node_name

_LONGEST_WAIT_S = 3600.0

OVER: Message = {"kind": "over"}
CUT: Message = {"kind": "cut"}


class Orders:
    """Hears the job in a thread, and calls `wake` there after each order for its step.

    `to`: whom it hears orders for: the number of the step's first start, or `SPARE`.

    If the job's agent has ended, the job is over: Slurm ends what still runs, as it ends other jobs. If it is silent,
    this node is cut off, or the batch host: ranks may have started elsewhere, so those here must end.
    """

    def __init__(self, client: Client, to: int | str, wake: Callable[[], None]) -> None:
        self._client, self._to, self._wake = client, to, wake
        self._given: collections.deque[Message] = collections.deque()
        self._changed = threading.Condition()
        client.notice()
        processes.start_thread(self._hear, "orders")

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
            if is_over or order.get("to") == self._to:
                with self._changed:
                    self._given.append(order)
                    self._changed.notify_all()
                self._wake()


SPARE = "spare"
"""In place of the number of a start, for orders to spares."""

_LIMIT_S = 30.0


def wait_as_spare(options: AgentOptions) -> int:
    """On a node that takes no ranks yet: wait for orders until the job is over. Returns the exit status.

    So the job learns when the node is lost; and the node is examined before ranks start on it.

    Signals are held: Slurm warns all steps of a job (--signal, preemption), and this one has nothing to save.
    """
    host = node_name(os.environ)
    client = Client.of_job(os.environ)
    client.always["spare"] = True
    client.say("hello", ranks=[], host=host, task=None)
    orders = Orders(client, SPARE, lambda: None)
    while client.is_connected and (order := orders.wait())["kind"] == "examine":
        if host in order["nodes"]:
            client.say("examined", host=host, fault=_examined(options))
    return 0


def _examined(options: AgentOptions) -> str:
    """What is wrong with this node, in words; empty if nothing is."""
    import subprocess  # few tasks need it

    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_STEP")}
    try:
        done = subprocess.run(
            python_module.doctor(options.command),
            env={**env, **launch_env.ALONE},
            preexec_fn=signals.let_come,  # else the doctor could end nothing by TERM
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the doctor did not end within {_LIMIT_S:g} s"
    except OSError as error:
        return f"the doctor can't be started: {error}"
    said = done.stdout or done.stderr
    fault = one_line(said.partition("error: ")[2] or said) or f"the doctor ended with status {done.returncode}"
    return fault if done.returncode else ""
