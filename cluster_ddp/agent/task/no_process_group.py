"""Whether a rank surely trains alone: to its end, or two minutes after its start, it has torch and no connection.

A rank of a process group keeps a TCP connection to the group's store, and with NCCL or gloo to other ranks. So a
process tree without any TCP socket has joined none. One with sockets may have: then nothing is said. Nor of one that
has hardly computed: on a busy node, or from a slow file system, imports take minutes.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.channel import Client
from cluster_ddp.agent.rank_notes import Notes

_NEVER = float("inf")

LAST_LOOK_S = 100.0
"""Seconds after the start of a command."""
EVERY_S, ALONE_EVERY_S = 2.0, 0.5
"""Seconds from one look to the next; from one that found the rank alone: it may join, train and end in a second."""
_IMPORTS_CPU_S = 15.0  # CPU time that imports may take
_ALONE_LOOKS = 17  # a short training has been alone for so long that it was no start


class GroupCheck:
    """Looks at the process of a rank. Reports one that trains alone to the job."""

    def __init__(self, pid: int, rank: int, world_size: int, notes: Notes, client: Client) -> None:
        self._pid, self._rank, self._notes, self._client = pid, rank, notes, client
        self._look_at = time.monotonic() + EVERY_S if world_size > 1 else _NEVER
        self._last_at = time.monotonic() + LAST_LOOK_S
        self._suspensions = processes.Suspensions()
        self._looks = 0  # that found it alone, up to the newest one

    def look(self) -> float:
        """Look, if it is time. Returns the seconds until then."""
        now = time.monotonic()
        self._last_at += self._suspensions.missed_s(EVERY_S)
        if now >= self._look_at:
            alone = not self._notes.has_joined(self._rank) and is_alone(self._pid)
            begins = alone and cpu_s(self._pid) < _IMPORTS_CPU_S
            self._looks = self._looks + 1 if alone and not begins else 0
            self._look_at = now + (ALONE_EVERY_S if alone else EVERY_S)
            if now >= self._last_at and not begins:
                self._report(1)
        return self._look_at - now

    def ended(self) -> None:
        """Report a rank that has ended well, if it was alone all the time."""
        if self._look_at < _NEVER:
            self._report(_ALONE_LOOKS)

    def _report(self, looks: int) -> None:
        self._look_at = _NEVER
        if self._looks >= looks:
            self._client.say("alone", rank=self._rank)


def is_alone(pid: int) -> bool:
    """Whether a command's processes have loaded torch, and surely are connected to no other rank."""
    tree = _tree(pid)
    try:
        return any(_has_torch(one) for one in tree) and not any(_has_tcp(one) for one in tree)
    except OSError:  # one has just ended, or can't be looked at
        return False


def cpu_s(pid: int) -> float:
    """Return how many seconds of CPU time a command's processes have used."""
    return sum(found.cpu_s for one in _tree(pid) if (found := processes.running(one)) is not None)


def _tree(pid: int) -> list[int]:
    tree = [pid]
    for one in tree:
        tree += processes.children(one)
    return tree


def _has_torch(pid: int) -> bool:
    """Whether a process has loaded torch, without MPI, which needs no TCP."""
    mapped = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return "libtorch" in mapped and "libmpi" not in mapped


def _has_tcp(pid: int) -> bool:
    """Whether a process has a TCP socket."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if (link := str(path.readlink())).startswith("socket:"):
                sockets.add(link)
    if not sockets:
        return False  # the tables of a busy host are long
    tables = [Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6")]
    texts = [table.read_text() for table in tables if table.exists()]  # a kernel may lack IPv6
    return any(f"socket:[{line.split()[9]}]" in sockets for text in texts for line in text.splitlines()[1:])
