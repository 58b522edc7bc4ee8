"""The nodes of a job: which train, which are left out, and the spares."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cluster_ddp import processes
from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.job import slurm_commands

# How long the agents of a step may take to end: Python may just begin there. Then srun gets TERM, and some time.
_PEACE_S, _TERM_S = 15.0, 2.0
_POLL_S = 0.1
_HAS_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
# How long a spare may take to examine its node.
_EXAMINED_S = 30.0
_CONNECTION_LOST = "Its connection is lost."
_SILENT = f"It did not examine itself within {_EXAMINED_S:g} s."


class Reason(NamedTuple):
    """Why a node is left out."""

    words: str
    is_at_fault: bool = True
    """Whether each requeue has to exclude it, as long as the job knows of it."""


LOST = Reason("the node does not answer", is_at_fault=False)  # Slurm finds it down
BEFORE = Reason("left out before", is_at_fault=False)  # the requeue that came then has excluded it


class Nodes(NamedTuple):
    """Nodes, in the order of the allocation: Slurm numbers ranks by it. All are empty if the nodes are not known."""

    allocated: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    left_out: Mapping[str, Reason] = {}
    least: int = 0
    """With so many, the training continues where it has no spares; 0 if it needs as many as it had."""

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that can replace others."""
        return tuple(one for one in self.allocated if one not in self.training and one not in self.left_out)

    def losing(self, lost: Sequence[str]) -> Nodes:
        """Return these nodes without those that are lost. Who trained there is still in `training`."""
        return self._replace(allocated=tuple(node for node in self.allocated if node not in lost))

    def without(self, out: Mapping[str, Reason]) -> Nodes | None:
        """Return the nodes that train if some are left out, too; None if there are too few."""
        left_out = {**self.left_out, **out}
        kept = [node for node in self.training if node not in left_out]
        spares = [node for node in self.spares if node not in left_out]
        chosen = {*kept, *spares[: len(self.training) - len(kept)]}
        if len(chosen) < (self.least or len(self.training)):
            return None
        training = tuple(node for node in self.allocated if node in chosen)
        return self._replace(training=training, left_out=left_out)


UNKNOWN = Nodes()
"""Where Slurm does not name them, or nobody needs to know them."""


def of_job(env: Mapping[str, str], spares: int, least: int = 0) -> Nodes:
    """Return the nodes of a job; the last ones are the spares. `least`: see `Nodes`."""
    names = slurm_commands.hostnames(env)
    return Nodes(names, names[: len(names) - spares], least=least) if len(names) > spares else UNKNOWN


def resize(nodes: Nodes, env: Mapping[str, str]) -> str:
    """Make a job smaller, so that it outlives the end of a node that it gives back.

    Of a job that Slurm has just queued again, the same request would make the nodes required: it might never start.
    scontrol writes slurm_job_N_resize.* into the working directory: a folder of its own.

    Returns:
        Why Slurm refused; empty if it did not.
    """
    instead = slurm_commands.why_not_this_start(env["SLURM_JOB_ID"], env)
    if instead.words:
        return f"this start of the job is over ({instead.words})" if instead.is_ok else instead.words
    with tempfile.TemporaryDirectory(prefix="cluster_ddp-resize-") as folder:
        argv = ["scontrol", "update", f"JobId={env['SLURM_JOB_ID']}", f"NodeList={','.join(nodes.allocated)}"]
        answer = slurm_commands.ask(argv, env, with_stderr=True, folder=folder)
    return "" if answer.is_ok else answer.words


class Ending:
    """Ends a step in the background: its agents have been told. Only those that stay are killed, as srun says."""

    def __init__(self, srun: int) -> None:
        self._srun = srun
        self._thread = processes.start_thread(self._end, "end of a step")

    def _end(self) -> None:
        deadline = time.monotonic() + _PEACE_S
        while os.waitid(os.P_PID, self._srun, _HAS_ENDED) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._srun, signal.SIGTERM)
        os.waitpid(self._srun, 0)

    def wait(self) -> None:
        """Wait for the end of srun, some seconds at most: what it says then is not the last word of the job."""
        self._thread.join(_PEACE_S + _TERM_S)


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
            self._faults[hello["host"]] = _CONNECTION_LOST
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
