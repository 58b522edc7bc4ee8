"""The beacon that tells the port of rank 0's store to the ranks of the run, and to nobody else.

Rank 0 runs a beacon on the first of the topology's candidate ports that it can bind. The other ranks try the candidates
one after the other until one proves to be their own beacon. A candidate that another program holds costs a fraction of
a second, whether that is another job of ours, a web server, or a socket that accepts and stays silent. (A TCPStore
client waits forever on such a socket, whatever its timeout: seen with torch 2.15.)

    rank      its nonce
    beacon    its nonce, and the HMAC of both for the purpose "rank 0"
    rank      the HMAC of both for the purpose "rank"
    beacon    the store's port, and the HMAC of it and both nonces for the purpose "port"

So without the run's key one learns only random numbers, and a recorded exchange is useless later. A stranger that
relays all messages learns the port, but cannot change it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster_ddp.agent.channel.lines import Key, new_nonce
from cluster_ddp.protocol import Env
from cluster_ddp.slurm.topology import Topology

_FIRST_PATIENCE_S, _LAST_PATIENCE_S = 0.25, 5.0
# How long an answer of the beacon may take if many ask at once. A rank that gives up early asks again and adds load.
_PATIENCE_PER_RANK_S = 0.001
_NOBODY = os.strerror(errno.ECONNREFUSED).lower()
_NOT_OURS = "rank 0 of another run, or with another secret"
# If nobody listens on a port, rank 0 has most likely not started: the ports after it are tried only now and then, since
# many ranks may wait.
_ASK_ALL_EVERY = 3
# Limits the rounds of all waiting ranks together to 50,000 a second.
_FIRST_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 2e-5
_LONGEST_LINE = 512
_GREETING = b"cluster_ddp"  # begins the beacon's first line, so that ranks of other runs recognize it
# How long the beacon keeps a caller, and how many besides the ranks it serves at once. Strangers may be silent, many,
# or both: then the oldest connection is closed.
_CALLER_S = 10.0
_OTHER_CALLERS = 64
_ACCEPTED_AT_ONCE = 64


def run_key(topology: Topology, env: Mapping[str, str]) -> Key:
    """Return the key that only the ranks of one run have: it differs from those of the job's other steps.

    It is made of the secret in `env` (`Env.SECRET`); for a run of one process it is random.
    """
    if topology.world_size == 1:
        return Key(os.urandom(32))
    return Key(os.fsencode(env.get(Env.SECRET, "")), topology.key)


@contextlib.contextmanager
def answering(listener: socket.socket, key: Key, store_port: int, ranks: int) -> Iterator[None]:
    """During the body, tell the store's port to everyone who connects and proves to have the key.

    The listener is shut down at the end. `ranks` is the number of ranks that may connect at once.
    """
    beacon = _Beacon(listener, key, str(store_port).encode(), ranks + _OTHER_CALLERS)
    thread = threading.Thread(target=beacon.run, name="beacon", daemon=True)
    thread.start()
    try:
        yield
    finally:
        beacon.is_over = True
        listener.shutdown(socket.SHUT_RDWR)  # which wakes it
        thread.join()


@dataclass(eq=False)
class _Caller:
    """A connection to the beacon."""

    connection: socket.socket
    gone_at: float
    heard: bytes = b""
    nonces: tuple[bytes, bytes] | None = None  # theirs and ours, once they were exchanged


class _Beacon:
    """Serves all callers from one thread. None waits for another."""

    def __init__(self, listener: socket.socket, key: Key, store_port: bytes, most_callers: int) -> None:
        self.is_over = False
        self._listener, self._key, self._store_port, self._most_callers = listener, key, store_port, most_callers
        self._callers: dict[socket.socket, _Caller] = {}  # in the order in which they connected
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
            except OSError:  # shut down; or too many open files; or the caller is gone
                if not self.is_over:
                    self._drop_first() if self._callers else time.sleep(0.01)
                return
            connection.setblocking(False)
            if len(self._callers) >= self._most_callers:
                self._drop_first()
            self._callers[connection] = _Caller(connection, time.monotonic() + _CALLER_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_first(self) -> None:
        self._drop(next(iter(self._callers.values())))

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.connection]
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def _listen_to(self, caller: _Caller) -> None:
        """Answer a complete line. Drop callers that send too much or a wrong line, or that closed the connection."""
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
        """Answer a line; return whether another one may follow."""
        if caller.nonces is None:
            caller.nonces = line, new_nonce()
            proof = self._key.mac("rank 0", *caller.nonces)
            caller.connection.send(b"%b %b %b\n" % (_GREETING, caller.nonces[1], proof))
            return True
        if self._key.proves(line, "rank", *caller.nonces):
            port = self._store_port
            caller.connection.send(b"%b %b\n" % (port, self._key.mac("port", port, *caller.nonces)))
        return False


def find_store(topology: Topology, key: Key, address: str, deadline: float) -> tuple[int | None, str]:
    """Try the candidate ports of rank 0's host, of a numeric address, until our own beacon answers.

    Args:
        deadline: when to give up, on the clock of time.monotonic().

    Returns:
        The store's port, or None if no beacon of this run answered; and the last answer on each port, in words.
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


def _ask(address: str, port: int, key: Key, patience_s: float) -> int | str:
    """The store's port if our beacon is on this port; else what its holder says. Takes `patience_s` seconds at most."""
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


def _store_port(connection: socket.socket, key: Key, deadline: float) -> int | str:
    """A rank's side of the protocol. Returns as `_ask`."""
    mine = new_nonce()
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
    """A line without its line break, or what comes before the deadline; about `_LONGEST_LINE` bytes at most."""
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
