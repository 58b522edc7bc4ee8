"""Whether a rank surely trains alone: two minutes after its start it has torch, and no connection to anybody.

A rank of a process group keeps a TCP connection to the group's store, and with NCCL or gloo to other ranks. So a
process tree without any TCP socket has joined none. One with sockets may have: then nothing is said.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.notes import Notes

LOOK_AFTER_S = 100.0
"""Seconds after the start of a command."""


class Watch:
    """Looks at one command, once.

    Args:
        pid: its process.
        rank: its rank; None for the parent of several.
        env: its environment.
        notes: where it says that it has joined.
        client: to the job, which is told.
    """

    def __init__(self, pid: int, rank: int | None, env: Mapping[str, str], notes: Notes, client: Client) -> None:
        self._pid, self._rank, self._notes, self._client = pid, rank, notes, client
        self._look_at = time.monotonic() + LOOK_AFTER_S
        self._is_over = rank is None or env.get("WORLD_SIZE", "1") == "1"

    def look(self) -> None:
        """Look, if it is time."""
        if self._is_over or time.monotonic() < self._look_at:
            return
        self._is_over = True
        if not self._notes.has_joined(self._rank) and is_alone(self._pid):
            self._client.say("alone", rank=self._rank)


def is_alone(pid: int) -> bool:
    """Whether a command's processes have loaded torch and have no TCP socket."""
    tree = [pid]
    for one in tree:
        tree += processes.children(one)
    return any(map(_has_torch, tree)) and not any(map(_has_tcp, tree))


def _has_torch(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def _has_tcp(pid: int) -> bool:
    """Whether a process has a TCP socket; also if that can't be seen."""
    try:
        sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
        texts = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except FileNotFoundError:  # it has just ended
        return not Path(f"/proc/{pid}").exists()
    except OSError:
        return True
    return any(f"socket:[{line.split()[9]}]" in sockets for text in texts for line in text.splitlines()[1:])
