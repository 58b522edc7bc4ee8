"""`python -m cluster_ddp.runtime.fork.warm FD`: imports torch, waits, and becomes a rank when its agent says so.

FD is a connected socket, on which it says "ready". The agent sends it one line of JSON with the words of the script or
module, changes of the environment, and its own standard streams. Until then it prints nothing. If the agent ends, or
needs no rank, the connection ends, and so does this process. See cluster_ddp/agent/task/warm.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from cluster_ddp.agent.task import signals
from cluster_ddp.contract import Env
from cluster_ddp.errors import ForkError
from cluster_ddp.runtime.fork import preload
from cluster_ddp.runtime.fork.target import Target

_MOST = 4096


def main() -> None:
    """Import, wait, and run what the agent says."""
    for number in signals.WARNINGS:  # Slurm may tell all processes: this one has nothing to save
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        try:
            preload.load(os.environ.get(Env.PRELOAD, "").split())
        except ForkError as error:
            agent.sendall(error.found.encode())
            return
        agent.sendall(b"ready")
        said = _heard(agent)
    if said is not None:
        target = _become(said)
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


def _become(said: Mapping[str, Any]) -> Target:
    """Make this process a rank: the next that it does is to run the target."""
    os.environ.update(said["env"])
    for number in signals.WARNINGS:
        signal.signal(number, signal.SIG_IGN if said["ignore_warnings"] else signal.SIG_DFL)
    preload.set_blas_threads(len(os.sched_getaffinity(0)))
    target = Target.parse(said["words"])
    target.prepare()
    return target


if __name__ == "__main__":
    main()
