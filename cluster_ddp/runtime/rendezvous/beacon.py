"""How the other ranks find rank 0's store on a port that anybody may hold, and rank 0 tells nobody else of it.

On the first of the topology's candidate ports that it can bind, rank 0 runs a beacon. The others ask the candidates one
after the other until one proves to be their own beacon. So a candidate that somebody else holds costs a fraction of a
second, whether that is another job of ours, a web server, or a socket that accepts and stays silent (on which a
TCPStore client waits for ever, whatever its timeout: seen with torch 2.15).

    rank      its nonce
    beacon    its nonce, and the HMAC of both for the purpose "rank 0"
    rank      the HMAC of both for the purpose "rank"
    beacon    the store's port, and the HMAC of it and both nonces for the purpose "port"

So to one that does not have the run's key neither says more than random numbers, and what was recorded is worth nothing
the next time. A stranger that passes all of it on learns the port, and cannot change it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from cluster_ddp.errors import RendezvousError
from cluster_ddp.runtime.rendezvous.secret import RunKey
from cluster_ddp.slurm.topology import Topology

LOOPBACK = "127.0.0.1"

_BACKLOG = 4096
_FIRST_PATIENCE_S, _LAST_PATIENCE_S = 0.25, 5.0
# What an answer of the beacon may take where many ask at once. Who gave up too early would ask again, and add to them.
_PATIENCE_PER_RANK_S = 0.001
_NOBODY = os.strerror(errno.ECONNREFUSED).lower()
_NOT_OURS = "rank 0 of another run, or with another secret"
# Where nobody listens on a port, rank 0 is most likely not there yet: the ports after it are tried now and then only,
# for those who wait may be many.
_ASK_ALL_EVERY = 3
# So that those who wait for rank 0 do not ask more often all together, the more they are: 50,000 rounds a second.
_FIRST_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 2e-5
_NONCE_BYTES = 16
_LONGEST_LINE = 512
_GREETING = b"cluster_ddp"  # begins the beacon's first line, so that others of ours know what it is
# How long the beacon listens to a caller, and how many it has at once besides the ranks. Strangers may be silent, many,
# or both: then the one that has been there longest has to go.
_CALLER_S = 10.0
_OTHER_CALLERS = 64
_ACCEPTED_AT_ONCE = 64


def bind_first_free(topology: Topology) -> socket.socket:
    """A socket that listens on the first candidate port that is free here.

    Raises:
        RendezvousError: none is.
    """
    for port in topology.port_candidates:
        with contextlib.suppress(OSError):
            return listen(topology, port)
    ports = ", ".join(map(str, topology.port_candidates))
    host = socket.gethostname()
    if len(topology.port_candidates) == 1:
        found = f"port {ports} on {host} is in use by another program (MASTER_PORT was preset, so no other is tried)."
        hint = f"unset MASTER_PORT, and a free one is found; who holds it: ss -ltnp 'sport = :{ports}' on {host}"
    else:
        found = f"ports {ports} on {host} are all in use."
        hint = f"who holds them: ss -ltnp on {host}"
    raise RendezvousError(f"Serving the rendezvous of {topology.world_size} ranks:", found, hint)


def listen(topology: Topology, port: int) -> socket.socket:
    """A socket that listens on a port: of this machine alone where all ranks are on it, else of all its interfaces."""
    if topology.num_nodes == 1:
        return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


@contextlib.contextmanager
def answering(listener: socket.socket, key: RunKey, store_port: int, ranks: int) -> Iterator[None]:
    """Inside, whoever connects to the listener and proves to have the key is told the store's port."""
    beacon = _Beacon(listener, key, str(store_port).encode(), ranks + _OTHER_CALLERS)
    thread = threading.Thread(target=beacon.run, name="beacon", daemon=True)
    thread.start()
    try:
        yield
    finally:
        beacon.is_over = True
        listener.shutdown(socket.SHUT_RDWR)  # which wakes it
        thread.join()


class _Caller:
    """One that has connected to the beacon."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.gone_at = time.monotonic() + _CALLER_S
        self.heard = b""
        self.nonces: tuple[bytes, bytes] | None = None  # theirs and ours, once they were exchanged


class _Beacon:
    """Serves all callers from one thread, so that none waits for another."""

    def __init__(self, listener: socket.socket, key: RunKey, store_port: bytes, most_callers: int) -> None:
        self.is_over = False
        self._listener, self._key, self._store_port, self._most_callers = listener, key, store_port, most_callers
        self._callers: dict[socket.socket, _Caller] = {}  # the one that came first is the first
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self.is_over:
            for ready, _ in self._selector.select(_CALLER_S / 10 if self._callers else None):
                if ready.fileobj is self._listener:
                    self._accept()
                elif caller := self._callers.get(ready.fileobj):  # type: ignore[call-overload]  # all are sockets
                    self._listen_to(caller)
            while self._callers and next(iter(self._callers.values())).gone_at < time.monotonic():
                self._drop_first()
        while self._callers:
            self._drop_first()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # shut down; or no more files may be open; or the caller is gone already
                if not self.is_over:
                    self._drop_first() if self._callers else time.sleep(0.01)
                return
            connection.setblocking(False)
            if len(self._callers) >= self._most_callers:
                self._drop_first()
            self._callers[connection] = _Caller(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_first(self) -> None:
        self._drop(next(iter(self._callers.values())))

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.connection]
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _listen_to(self, caller: _Caller) -> None:
        """Answer what is one line now; send away who says too much, nothing more, or what is not right."""
        try:
            heard = caller.connection.recv(_LONGEST_LINE)
            caller.heard += heard
            line, end, rest = caller.heard.partition(b"\n")
            stays = bool(heard) and not rest and len(caller.heard) < _LONGEST_LINE
            if stays and end:
                caller.heard = b""
                stays = self._answer(caller, line)
        except BlockingIOError:
            return
        except OSError:
            stays = False
        if not stays:
            self._drop(caller)

    def _answer(self, caller: _Caller, line: bytes) -> bool:
        """Answer a line; returns whether another one may follow."""
        if caller.nonces is None:
            caller.nonces = line, _nonce()
            proof = self._key.mac("rank 0", *caller.nonces)
            caller.connection.send(b"%b %b %b\n" % (_GREETING, caller.nonces[1], proof))
            return True
        if self._key.proves(line, "rank", *caller.nonces):
            port = self._store_port
            caller.connection.send(b"%b %b\n" % (port, self._key.mac("port", port, *caller.nonces)))
        return False


def _nonce() -> bytes:
    return os.urandom(_NONCE_BYTES).hex().encode()


def find_store(topology: Topology, key: RunKey, address: str, deadline: float) -> tuple[int | None, str]:
    """Ask the candidate ports of rank 0's host one after the other until our own beacon answers.

    Args:
        topology: of the rank that asks.
        key: of its run.
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
            answer = _ask(address, port, key, min(patience_s, max(0.1, deadline - time.monotonic())))
            if isinstance(answer, int):
                return answer, ""
            heard[port] = answer
            if answer == _NOBODY and rounds % _ASK_ALL_EVERY:
                break
        if time.monotonic() > deadline:
            return None, ", ".join(f"{port}: {answer or 'silence'}" for port, answer in heard.items())[:400]
        pause_s = _FIRST_PAUSE_S + patience_s / 10 + _PAUSE_PER_RANK_S * topology.world_size
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic()) + 0.01))
        patience_s = min(1.5 * patience_s, _LAST_PATIENCE_S)


def _ask(address: str, port: int, key: RunKey, patience_s: float) -> int | str:
    """In at most `patience_s` seconds: the store's port, if our beacon holds this port; else what its holder says."""
    deadline = time.monotonic() + patience_s
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
            connection.settimeout(patience_s)
            connection.connect((address, port))
            return _store_port(connection, key, deadline)
    except TimeoutError:
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _store_port(connection: socket.socket, key: RunKey, deadline: float) -> int | str:
    """A rank's side of the protocol."""
    mine = _nonce()
    connection.sendall(mine + b"\n")
    line = _line(connection, deadline)
    greeting, _, rest = line.partition(b" ")
    theirs, _, proof = rest.partition(b" ")
    if greeting != _GREETING or not key.proves(proof, "rank 0", mine, theirs):
        words = "".join(letter if letter.isprintable() else " " for letter in line.decode(errors="replace"))
        return _NOT_OURS if greeting == _GREETING else words.strip()[:80]
    connection.sendall(key.mac("rank", mine, theirs) + b"\n")
    port, _, proof = _line(connection, deadline).partition(b" ")
    return int(port) if key.proves(proof, "port", port, mine, theirs) else ""


def _line(connection: socket.socket, deadline: float) -> bytes:
    """A line without its end, or as much as comes until the deadline, of `_LONGEST_LINE` bytes at most."""
    heard = b""
    while b"\n" not in heard and len(heard) < _LONGEST_LINE:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            more = connection.recv(_LONGEST_LINE)
        except TimeoutError:
            break
        if not more:
            break
        heard += more
    return heard.partition(b"\n")[0]
