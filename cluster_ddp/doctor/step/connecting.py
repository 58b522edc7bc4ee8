"""How ranks connect to other nodes, and in which way it fails there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster_ddp.agent.channel import Client, Key
from cluster_ddp.doctor.findings import Finding

_Connection = TypeVar("_Connection", socket.socket, Client)

REFUSED, FILTERED, NO_ROUTE, NO_NAME = "refused", "filtered", "no route", "no such host"
"""Ways to fail: nobody listens there; nobody answers; the network does not lead there; the name is unknown."""
NO_PORT = "no free port"
"""This node has no port left for the connection."""
HELD, NO_ANSWER = "held by another program", "no answer"
"""Somebody else listens there; a connection was made, and nobody says anything on it."""
UNREACHED_HINTS = {
    FILTERED: "a firewall drops it: ask your site to open all TCP ports between the compute nodes (iptables -L -n)",
    NO_ROUTE: "no network leads there: ip route get ADDRESS on that node",
    NO_PORT: "that node has no port left: ss -tanp",
    NO_NAME: "the name is unknown there: getent hosts NAME on that node",
}
"""How a connection fails where a host can't be reached, whether or not a process listens there -> what to do."""
_CONNECT_S, _GREETING_S = 1.5, 4.0
_TRIES = 8
_KINDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: REFUSED,
    errno.ETIMEDOUT: FILTERED,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
    errno.EACCES: NO_ROUTE,  # `ip route add prohibit`
    errno.EPERM: FILTERED,  # a firewall of this node itself
    errno.EADDRNOTAVAIL: NO_PORT,
    errno.EINVAL: NO_ROUTE,  # `ip route add blackhole`
}


class SilentListenerError(TimeoutError):
    """A connection was made, and nobody says anything on it."""


def kind_of(error: OSError) -> str:
    """Return in which way a connection failed."""
    if isinstance(error, socket.gaierror):
        return NO_NAME
    if isinstance(error, SilentListenerError):
        return NO_ANSWER
    if isinstance(error, TimeoutError):
        return FILTERED
    return _KINDS.get(error.errno or 0, error.strerror or str(error))


def greet(host: str, port: int, key: Key) -> Client:
    """Connect to rank 0's port, and let it prove that it is of this run.

    Raises:
        OSError: it can't be reached, or it is another program.
    """
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    try:
        return Client(connection, key, _GREETING_S)
    except TimeoutError:
        raise SilentListenerError from None
    except OSError as error:
        raise OSError(errno.EPROTO, HELD) from error


def several_tries(attempt: Callable[[], _Connection]) -> _Connection:
    """Try once; if no answer comes, try several times at once: where packets get lost, one of them passes.

    Returns the connection, or raises the OSError that says most.
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


def no_way(rank: int, report: Mapping[str, Any], address: str) -> Finding:
    """Return that a rank can't connect to rank 0, and how it failed."""
    failures = report.get("failures") or {}
    kinds = [*failures.values(), NO_ANSWER]
    kind = next((one for one in failures.values() if one != REFUSED), kinds[0])
    hints = {
        **UNREACHED_HINTS,
        REFUSED: "nothing listens there, or a firewall rejects it: iptables -L -n on both nodes",
    }
    return Finding(
        check="way_to_rank_0",
        what=f"Ranks can't connect to rank 0's host, {address}: {kind}.",
        evidence=f"port {', '.join(f'{port}: {why}' for port, why in failures.items()) or 'unknown'}",
        hint=hints.get(kind, "set another MASTER_PORT, or unset it"),
    ).seen_on(report["host"], rank)
