"""Tier 2: each node connects to the next one: is there a way, for large packets too, and how fast is it?

gloo and NCCL connect to ports that the system chooses (ip_local_port_range), on the interface of the route. So the
links are tried on such ports: a firewall may open the master's port only.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from cluster_ddp.agent import channel_server
from cluster_ddp.doctor.step.connecting import kind_of, several_tries
from cluster_ddp.slurm.topology import Topology

_ECHO, _SINK = 0, 1
_HEADER = struct.Struct("!BQ")
_CONNECT_S, _SMALL_S, LARGE_S, _BANDWIDTH_S, _REST_S = 2.0, 4.0, 4.0, 1.0, 30.0
LARGE, _CHUNK = 256 * 1024, 1024 * 1024
_ROUND_TRIPS = 21
LOSSY = 0.1
_BROKE = "the connection broke at once"
# tcp_info.tcpi_total_retrans in linux/tcp.h: packets that were sent again.
_RETRANSMITTED = struct.Struct("=100xI")
# What answers a piece: nanoseconds.
_WAITED = struct.Struct("!Q")
# Half of what gigabit Ethernet gives: less is a fault, or not a network for training.
SLOW_BYTES_PER_S = 60e6


def own_address(topology: Topology) -> str | None:
    """Return the address of this node on the route to another node; None if there is no route."""
    others = [topology.master_addr] if topology.node_rank else list(topology.nodes[1:])
    for host in others:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host.encode(), 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


class Listener:
    """Answers the tries of another node, on a port that the system chooses."""

    def __init__(self) -> None:
        self._socket = channel_server.listener(0)
        self.port: int = self._socket.getsockname()[1]
        """The port."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError), connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_REST_S)
        while True:
            mode, size = _HEADER.unpack(_exactly(connection, _HEADER.size))
            if size > 64 * _CHUNK:
                return  # a stranger
            data = _exactly(connection, size)
            connection.sendall(data if mode == _ECHO else _WAITED.pack(_waited_ns()))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), _CHUNK))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLink:
    """What a node found on the way to another."""

    source: str
    """The node that connected."""
    target: str
    """The node that listened."""
    failure: str | None = None
    """Why there is no connection: refused, filtered, no route, no such host; None if there is one."""
    lost: float = 0.0
    """Part of the packets of small messages that had to be sent again."""
    large_fail: bool = False
    """Whether small messages pass and large ones don't."""
    latency_s: float | None = None
    """Seconds for a small message there and back, the median."""
    bytes_per_s: float | None = None
    """Bandwidth."""
    at_most_bytes_per_s: float | None = None
    """The same without the time in which one of both ends waited for a core: else busy cores look like a slow link."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.source} -> {self.target}"


def measure(source: str, target: str, address: str, port: int) -> NetworkLink:
    """Connect to another node's listener and measure the way there. Takes at most about twenty seconds."""
    link = _measured(source, target, address, port)
    return _measured(source, target, address, port) if link.failure == _BROKE else link


def _measured(source: str, target: str, address: str, port: int) -> NetworkLink:
    try:
        connection = several_tries(lambda: socket.create_connection((address, port), _CONNECT_S))
    except OSError as error:
        return NetworkLink(source=source, target=target, failure=kind_of(error))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        latencies = _small(connection)
        if not latencies:
            return NetworkLink(source=source, target=target, failure=_BROKE)
        latency_s = statistics.median(latencies)
        if (lost := _lost(connection, len(latencies))) > LOSSY:
            return NetworkLink(source=source, target=target, lost=lost, latency_s=latency_s)
        connection.settimeout(LARGE_S)
        try:
            _timed(connection, bytes(LARGE))
        except (OSError, EOFError):
            return NetworkLink(source=source, target=target, large_fail=True, latency_s=latency_s)
        connection.settimeout(_REST_S)
        rates = _bandwidth(connection)
        if rates is not None and rates[1] < SLOW_BYTES_PER_S:  # perhaps for a moment
            rates = max(rates, _bandwidth(connection) or rates, key=itemgetter(1))
        rate, at_most = rates or (None, None)
        return NetworkLink(
            source=source, target=target, latency_s=latency_s, bytes_per_s=rate, at_most_bytes_per_s=at_most
        )


def _small(connection: socket.socket) -> list[float]:
    """Return the seconds of small messages there and back, one after the other; fewer if they take long."""
    connection.settimeout(_SMALL_S)
    end, latencies = time.monotonic() + _SMALL_S, list[float]()
    with contextlib.suppress(OSError, EOFError):
        while len(latencies) < _ROUND_TRIPS and time.monotonic() < end:
            latencies.append(_timed(connection, b"x"))
    return latencies


def _lost(connection: socket.socket, messages: int) -> float:
    """Return the part of the packets that had to be sent again, if each message is one packet."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED.size)
    again: int = _RETRANSMITTED.unpack(info)[0]
    return again / (again + messages)


def _timed(connection: socket.socket, data: bytes) -> float:
    start = time.monotonic()
    connection.sendall(_HEADER.pack(_ECHO, len(data)) + data)
    _exactly(connection, len(data))
    return time.monotonic() - start


def _bandwidth(connection: socket.socket) -> tuple[float, float] | None:
    """Return the bytes per second, and what they were at most if nobody waited for a core.

    None if most of the time was such a wait: the kernel's own work on packets waits then, too, and nobody counts that.
    Of the second half of the time: a link may let the first pieces pass quickly. All of it counts, since one that drops
    what is above its rate lets pieces pass quickly after each of its pauses.
    """
    arrived = [(time.monotonic(), 0)]
    with contextlib.suppress(OSError, EOFError):
        while arrived[-1][0] - arrived[0][0] < _BANDWIDTH_S and len(arrived) <= 64:
            theirs_ns = _send_piece(connection)
            arrived.append((time.monotonic(), theirs_ns + _waited_ns()))
    half = (arrived[0][0] + arrived[-1][0]) / 2
    pieces = [(before, after) for before, after in itertools.pairwise(arrived[1:]) if after[0] > half]
    if not pieces:
        return None
    ((start, earlier), _), (_, (end, waited)) = pieces[0], pieces[-1]
    size, took, waited_s = len(pieces) * _CHUNK, end - start, (waited - earlier) / 1e9
    return None if waited_s > took / 2 else (size / took, size / (took - waited_s))


def _send_piece(connection: socket.socket) -> int:
    """Send a piece. Returns how long the other end has waited for a core so far, in nanoseconds."""
    connection.sendall(_HEADER.pack(_SINK, _CHUNK) + bytes(_CHUNK))
    (waited_ns,) = _WAITED.unpack(_exactly(connection, _WAITED.size))
    return int(waited_ns)


def _waited_ns() -> int:
    """Return for how many nanoseconds this thread has waited for a core (Linux, sched-stats.rst); 0 if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0
