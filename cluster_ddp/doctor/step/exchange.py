"""How the ranks' reports reach rank 0, and its instructions reach them, on a cluster where anything may be broken.

Rank 0 listens on a candidate port of the topology, the port that the training would take. The others connect to it by
the agent's channel, say at once that they are here, and then send a message for each tier. Until they are connected
they write their last message to a file. So the exchange is a test itself: a report that comes as a file only is from a
rank that does not reach the master's port.

A message's kind is its tier; a report has also the rank, the host and the id of its process.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

POLL_S = 0.1
"""Seconds between two looks for files."""
REPORT, LAST = "report-", "end.json"
"""Prefix of the file of a report; the file with the hub's last message."""
LEADS, SPEAKS = "leads", "speaks"
"""The file that rank 0 makes; the file of the rank that speaks in its place."""
REFUSED = "refused"
"""How a connection failed: a host answers that nobody listens."""
HELD, NO_ANSWER = "held by another program", "no answer"
"""How a connection failed: somebody else listens; nobody says anything."""
NO_PORT = "no free port"
"""How a connection failed: this node has no port left for it."""
_FILTERED, _NO_ROUTE, _NO_NAME = "filtered", "no route", "no such host"
_TRIES = 8
_KINDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: REFUSED,
    errno.ETIMEDOUT: _FILTERED,
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EACCES: _NO_ROUTE,  # `ip route add prohibit`
    errno.EPERM: _FILTERED,  # a firewall of this node itself
    errno.EADDRNOTAVAIL: NO_PORT,
    errno.EINVAL: _NO_ROUTE,  # `ip route add blackhole`
}


class _Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closable)


class SilentListenerError(TimeoutError):
    """A connection was made, and nobody says anything on it."""


def several_tries(attempt: Callable[[], _Made]) -> _Made:
    """Try once; if no answer comes, try several times at once: where packets get lost, one of them passes.

    Args:
        attempt: makes a connection.

    Raises:
        OSError: there is none.
    """
    try:
        return attempt()
    except TimeoutError as error:
        with ThreadPoolExecutor(_TRIES) as pool:
            tries = [pool.submit(attempt) for _ in range(_TRIES)]
        found = [one.result() for one in tries if one.exception() is None]
        for more in found[1:]:
            more.close()
        if not found:  # a refusal says more than silence
            said = [no for one in tries if (no := one.exception()) and not isinstance(no, TimeoutError)]
            raise next(iter(said), error) from None
        return found[0]


def kind_of(error: OSError) -> str:
    """Return which way a connection failed: refused, filtered, no route, or no such host."""
    if isinstance(error, socket.gaierror):
        return _NO_NAME
    if isinstance(error, SilentListenerError):
        return NO_ANSWER
    if isinstance(error, TimeoutError):
        return _FILTERED
    return _KINDS.get(error.errno or 0, error.strerror or str(error))


def is_first(folder: Path, name: str) -> bool:
    """Make a file. Returns whether no other process had made it.

    Raises:
        OSError: it can't be made.
    """
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
