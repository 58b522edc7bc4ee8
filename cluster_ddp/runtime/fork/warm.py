"""`python -m cluster_ddp.runtime.fork.warm FD`: imports torch, waits, and becomes a rank when its agent says so.

FD is a connected socket. The agent sends it one line of JSON, with the command of the rank, changes of the environment,
and its own standard streams; until then this process prints nothing. If it can't import all, it says why on the socket,
and starts the command with a new Python instead. If the agent ends, or needs no rank, the connection ends, and so does
this process. See cluster_ddp/agent/task/warm.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

from cluster_ddp import processes
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.warm import BEGUN
from cluster_ddp.contract import Env
from cluster_ddp.errors import ForkError
from cluster_ddp.runtime.fork import preload
from cluster_ddp.runtime.fork.target import Target

_MOST = 4096


def main() -> None:
    """Import, wait, and run what the agent says."""
    for number in signals.WARNINGS:  # Slurm may tell all processes: this one has nothing to save
        signal.signal(number, signal.SIG_IGN)
    has_all = True
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        agent.sendall(BEGUN.encode())
        try:
            preload.load(os.environ.get(Env.PRELOAD, "").split())
        except Exception as error:  # such as a broken torch: the rank's own Python says it, if it needs that
            why = error.found if isinstance(error, ForkError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # the agent may have told it already
                agent.sendall(why.encode())
            has_all = False
        said = _heard(agent)
    if said is None:
        return
    os.environ.update(said["env"])
    for number in signals.WARNINGS:
        signal.signal(number, signal.SIG_IGN if said["ignore_warnings"] else signal.SIG_DFL)
    if not has_all:
        os.execvp(said["command"][0], said["command"])
    if rank := os.environ.get("RANK"):  # else it becomes a process that forks them
        processes.rename(f"rank {rank}")
    preload.set_blas_threads(len(os.sched_getaffinity(0)))
    target = Target.parse(said["command"][said["at"] :])
    target.prepare()
    target.run()


def _heard(agent: socket.socket) -> Any:
    """Wait for the line, and take the standard streams that come with it. Returns None if there is none."""
    line, streams, _, _ = socket.recv_fds(agent, _MOST, 3)
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    while line and not line.endswith(b"\n"):
        line += (more := agent.recv(_MOST))
        if not more:
            return None
    return json.loads(line) if line else None


if __name__ == "__main__":
    main()
