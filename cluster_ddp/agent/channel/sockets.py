"""The sockets of the channel, and of whoever else listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

_BACKLOG = 4096
# A machine that is gone does not end its connections: the kernels then ask each second, and it has missed three.
_SILENT_S, _MISSES = 1, 3
_SUSPICIOUS = 2


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on all interfaces, on the first free one of some ports; without any, on any port.

    Raises:
        OSError: none is free.
    """
    for port in ports:
        with contextlib.suppress(OSError):
            return listener(port)
    return listener(0)


def listen_here() -> socket.socket:
    """Return a socket that listens on this machine only, on any port."""
    return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)


def listener(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, on a port; 0 for any.

    Raises:
        OSError: it is not free.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel may have it switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def notice(connection: socket.socket) -> None:
    """Let a connection end soon after the other machine was cut off: then who reads it gets an error (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MISSES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_SILENT_S + _MISSES) * 1000)


def is_silent(connection: socket.socket) -> bool:
    """Whether the other machine has missed two questions of `notice`: if it misses another one, the connection ends."""
    with contextlib.suppress(OSError):  # it has just ended
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[3] >= _SUSPICIOUS  # tcpi_probes
    return False
