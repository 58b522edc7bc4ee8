"""How the ranks' reports reach rank 0, and its instructions reach them, on a cluster where anything may be broken.

Rank 0 listens on a candidate port of the topology, the port that the training would take. The others connect to it and
send a line of JSON for each tier. They also write the first report as a file, for the case that they can't connect. So
the exchange is a test itself: a report that comes as a file only is from a rank that does not reach the master's port.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RendezvousError
from cluster_ddp.files import atomic_write
from cluster_ddp.runtime.rendezvous import beacon
from cluster_ddp.runtime.rendezvous.secret import RunKey
from cluster_ddp.slurm.topology import Topology

_POLL_S = 0.1
_CONNECT_S = 3.0
_GREETING = "cluster_ddp doctor"
_REPORT, _LAST = "report-", "end.json"
_READ_S = 3.0
_REFUSED, _FILTERED, _NO_ROUTE, _NO_NAME = "refused", "filtered", "no route", "no such host"
_KINDS = {
    errno.ECONNREFUSED: _REFUSED,
    errno.ECONNRESET: _REFUSED,
    errno.ETIMEDOUT: _FILTERED,
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EACCES: _NO_ROUTE,  # `ip route add prohibit`
    errno.EPERM: _FILTERED,  # a firewall of this node itself
    errno.EINVAL: _NO_ROUTE,  # `ip route add blackhole`
}

Message = dict[str, Any]


def kind_of(error: OSError) -> str:
    """Return which way a connection failed: refused, filtered, no route, or no such host."""
    if isinstance(error, socket.gaierror):
        return _NO_NAME
    if isinstance(error, TimeoutError):
        return _FILTERED
    return _KINDS.get(error.errno or 0, error.strerror or str(error))


def _with_free_ports(topology: Topology) -> Topology:
    """The topology with the next ports, if the launcher (torchrun's agent) serves its store on the master's port."""
    if not topology.launcher_store:
        return topology
    first = min(topology.master_port, 65000)
    return replace(topology, port_candidates=tuple(range(first + 1, first + 9)))


class Hub:
    """Rank 0's side: it collects messages of all ranks and answers all.

    Args:
        topology: of rank 0; None if its environment contradicts itself: then it only reads files.
        key: the key of this run.
        folder: where reports lie that could not be sent; None if it can't be made.
    """

    def __init__(self, topology: Topology | None, key: RunKey, folder: Path | None) -> None:
        self._key, self._folder = key, folder
        self._received: dict[str, dict[int, Message]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._lost: set[int] = set()
        self._news = threading.Condition()
        self.twice: dict[int, list[str]] = {}
        """Ranks that several processes claim to be -> their hosts."""
        self.port_error: RendezvousError | None = None
        """Why rank 0 can't listen; None if it does."""
        self._listener: socket.socket | None = None
        if topology is not None and topology.world_size > 1:
            self._listen(_with_free_ports(topology))

    def put(self, tier: str, rank: int, message: Message) -> None:
        """Add a rank's message. If another process has sent one as this rank, note that."""
        with self._news:
            before = self._received.setdefault(tier, {}).setdefault(rank, message)
            if before.get("id") != message.get("id"):
                hosts = [str(one.get("host")) for one in (before, message)]
                self.twice.setdefault(rank, hosts)
            elif before.get("by") != "tcp":
                self._received[tier][rank] = message
            self._news.notify_all()

    def gather(
        self, tier: str, ranks: int, timeout_s: float, *, settle_s: float = 0.0
    ) -> tuple[dict[int, Message], set[int]]:
        """Wait for the messages of all ranks.

        Args:
            tier: which message.
            ranks: number of ranks.
            timeout_s: seconds to wait.
            settle_s: seconds to wait after that until those that are known by a file have connected or given up.

        Returns:
            Rank -> its message; and the ranks whose connection has ended.
        """

        def are_all_here() -> bool:
            found = self._received.get(tier, {})
            return len(found) + len(self._lost - found.keys()) >= ranks

        def are_all_connected() -> bool:
            reports = self._received.get(tier, {}).values()
            return all(one.get("by") != "file" or "failures" in one for one in reports)

        self._wait(are_all_here, timeout_s)
        self._wait(are_all_connected, settle_s)
        with self._news:
            return dict(self._received.get(tier, {})), set(self._lost)

    def tell(self, message: Message) -> None:
        """Send a message to all ranks; the last one, whose tier is "end", also by a file."""
        line = json.dumps(message).encode() + b"\n"
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.sendall(line)
        if self._folder is not None and message["tier"] == "end":
            with contextlib.suppress(OSError), atomic_write(self._folder / _LAST) as file:
                file.write(line)

    def close(self) -> None:
        """Wait until those that read files have read the last message, and close all connections."""
        self._wait(lambda: self._folder is None or not any(self._folder.glob(f"{_REPORT}*")), _READ_S)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

    def _listen(self, topology: Topology) -> None:
        try:
            self._listener = beacon.bind_first_free(topology)
        except RendezvousError as error:
            self.port_error = error
            return
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._read_files()
            with self._news:
                if condition() or time.monotonic() > deadline:
                    return
                self._news.wait(_POLL_S)

    def _read_files(self) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{_REPORT}*.json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    message = json.loads(path.read_text())
                    self.put(message["tier"], message["rank"], {**message, "by": "file"})

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rank = None
        with contextlib.suppress(OSError, ValueError, KeyError), connection.makefile("rb") as lines:
            nonce = lines.readline(200).strip()
            connection.sendall(_GREETING.encode() + b" " + self._key.mac("doctor", nonce) + b"\n")
            for line in lines:
                message = json.loads(line)
                rank = int(message["rank"])
                self._connections[rank] = connection
                self.put(message["tier"], rank, {**message, "by": "tcp", "received_at": time.time()})
        if rank is not None:
            with self._news:
                self._lost.add(rank)
                self._news.notify_all()


class Spoke:
    """Another rank's side: it sends its reports to rank 0 and waits for instructions.

    Args:
        topology: of this rank; None if its environment contradicts itself: then it only writes a file.
        key: the key of this run.
        folder: where to write what can't be sent; None if it can't be made.
    """

    def __init__(self, topology: Topology | None, key: RunKey, folder: Path | None) -> None:
        self._topology = None if topology is None else _with_free_ports(topology)
        self._key, self._folder = key, folder
        self._connection: socket.socket | None = None
        self._lines: Any = None
        self._file: Path | None = None
        self.failures: dict[str, str] = {}
        """Port of rank 0 -> how the connection failed."""

    def send(self, message: Message, timeout_s: float) -> bool:
        """Send a message to rank 0; write it to a file, too, until a connection stands.

        Returns:
            Whether it was sent or written.
        """
        is_written = self._connection is None and self._write(message)
        if self._connection is None and self._topology is not None:
            self._connect(time.monotonic() + timeout_s)
        if self._connection is None:
            return self._write({**message, "failures": self.failures}) or is_written
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return is_written
        self._forget_file()
        return True

    @property
    def is_connected(self) -> bool:
        """Whether it has reached rank 0."""
        return self._connection is not None

    def told(self, timeout_s: float) -> Message | None:
        """Wait for rank 0's next message; without a connection, for its last. None if none comes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._connection is not None:
                self._connection.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    line = self._lines.readline()
                    return dict(json.loads(line)) if line else None
                except (OSError, ValueError):
                    return None
            if self._folder is not None:
                with contextlib.suppress(OSError, ValueError):
                    return dict(json.loads((self._folder / _LAST).read_text()))
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Close the connection; remove the file: rank 0 waits for that."""
        self._forget_file()
        if self._connection is not None:
            self._connection.close()

    def _forget_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None

    def _connect(self, deadline: float) -> None:
        assert self._topology is not None
        is_local = self._topology.num_nodes == 1
        host = beacon.LOOPBACK if is_local else self._topology.master_addr
        while self._connection is None and time.monotonic() < deadline:
            for port in self._topology.port_candidates:
                patience_s = min(_CONNECT_S, max(0.2, deadline - time.monotonic()))
                try:
                    connection = socket.create_connection((host, port), timeout=patience_s)
                except OSError as error:
                    self.failures[str(port)] = kind_of(error)
                    if self.failures[str(port)] != _REFUSED:
                        break  # the other ports would not answer either
                    continue
                if self._is_ours(connection):
                    self._connection = connection
                    return
                self.failures[str(port)] = "held by another program"
                connection.close()
            time.sleep(_POLL_S)

    def _is_ours(self, connection: socket.socket) -> bool:
        nonce = os.urandom(16).hex().encode()
        try:
            connection.sendall(nonce + b"\n")
            self._lines = connection.makefile("rb")
            answer = self._lines.readline(200).strip()
        except OSError:
            return False
        greeting, _, proof = answer.rpartition(b" ")
        return greeting == _GREETING.encode() and self._key.proves(proof, "doctor", nonce)

    def _write(self, message: Mapping[str, Any]) -> bool:
        if self._folder is None:
            return False
        path = self._folder / f"{_REPORT}{message['rank']}-{message['id']}.json"
        with contextlib.suppress(OSError), atomic_write(path) as file:
            file.write(json.dumps(message).encode())
            self._file = path
            return True
        return False
