"""How the other ranks find rank 0's store on a port that anybody may hold.

On the first of the topology's candidate ports that it can bind, rank 0 runs a beacon, which tells whoever connects the
run's key and the store's port. The others ask the candidates in turn until one answers with their own key. So a
candidate that somebody else holds costs a fraction of a second, whether that is another job of ours, a web server, or a
socket that accepts and stays silent (on which a TCPStore client waits for ever, whatever its timeout: seen with torch
2.15).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

from cluster_ddp.errors import RendezvousError
from cluster_ddp.slurm.environment import Topology

_BACKLOG = 4096
_FIRST_PATIENCE_S, _LAST_PATIENCE_S = 0.25, 5.0
# What an answer of the beacon may take where many ask at once. Who gave up too early would ask again, and add to them.
_PATIENCE_PER_RANK_S = 0.001
_NOBODY = os.strerror(errno.ECONNREFUSED).lower()
# Where nobody listens on a port, rank 0 is most likely not there yet: the ports after it are tried now and then only,
# for those who wait may be many.
_ASK_ALL_EVERY = 3
# So that those who wait for rank 0 do not ask more often all together, the more they are: 50,000 rounds a second.
_FIRST_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 2e-5


def bind_first_free(topology: Topology) -> socket.socket:
    """A socket that listens on the first candidate port that is free here.

    Raises:
        RendezvousError: none is.
    """
    for port in topology.port_candidates:
        with contextlib.suppress(OSError):
            return _listen(port)
    ports = ", ".join(map(str, topology.port_candidates))
    host = socket.gethostname()
    if len(topology.port_candidates) == 1:
        found = f"port {ports} on {host} is in use by another program (MASTER_PORT was preset, so no other is tried)."
        hint = f"unset MASTER_PORT, and a free one is found; who holds it: ss -ltnp 'sport = :{ports}' on {host}"
    else:
        found = f"ports {ports} on {host} are all in use."
        hint = f"who holds them: ss -ltnp on {host}"
    raise RendezvousError(f"Serving the rendezvous of {topology.world_size} ranks:", found, hint)


def _listen(port: int) -> socket.socket:
    """A socket that listens on a port of all interfaces, of IPv4 and, where the host has it, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


@contextlib.contextmanager
def answering(listener: socket.socket, key: str, store_port: int) -> Iterator[None]:
    """Inside, whoever connects to the listener is told our key and the store's port."""
    beacon = threading.Thread(target=_answer, args=(listener, f"{key} {store_port}\n".encode()), daemon=True)
    beacon.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake its accept(), which holds the port
        beacon.join()


def _answer(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # shut down: everybody has met
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(answer)


def find_store(topology: Topology, address: str, deadline: float) -> tuple[int | None, str]:
    """Ask the candidate ports of rank 0's host in turn until our own beacon answers.

    Args:
        topology: of the rank that asks.
        address: of rank 0's host, numeric.
        deadline: when to give up, on the clock of time.monotonic().

    Returns:
        The store's port, None if nobody told it; and what was heard on each candidate in the end.
    """
    patience_s = min(_LAST_PATIENCE_S, _FIRST_PATIENCE_S + _PATIENCE_PER_RANK_S * topology.world_size)
    heard: dict[int, str] = {}
    rounds = 0
    while True:
        rounds += 1
        for port in topology.port_candidates:
            heard[port] = _ask(address, port, min(patience_s, max(0.1, deadline - time.monotonic())))
            key, _, store_port = heard[port].rpartition(" ")
            if key == topology.key and store_port.isdigit():
                return int(store_port), ""
            if heard[port] == _NOBODY and rounds % _ASK_ALL_EVERY:
                break
        if time.monotonic() > deadline:
            return None, ", ".join(f"{port}: {answer or 'silence'}" for port, answer in heard.items())[:400]
        pause_s = _FIRST_PAUSE_S + patience_s / 10 + _PAUSE_PER_RANK_S * topology.world_size
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic()) + 0.01))
        patience_s = min(1.5 * patience_s, _LAST_PATIENCE_S)


def _ask(address: str, port: int, patience_s: float) -> str:
    """What the holder of a port says first, in at most `patience_s` seconds; "" for silence."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
            connection.settimeout(patience_s)
            connection.connect((address, port))
            return connection.recv(512).decode(errors="replace").strip()
    except TimeoutError:
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()
