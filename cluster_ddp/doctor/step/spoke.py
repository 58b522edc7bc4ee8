"""The other ranks' side of the exchange: it sends reports to rank 0 and waits for instructions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.doctor.step import exchange
from cluster_ddp.doctor.step.exchange import Message
from cluster_ddp.files import atomic_write
from cluster_ddp.runtime.rendezvous import beacon
from cluster_ddp.runtime.rendezvous.secret import RunKey
from cluster_ddp.slurm.topology import Topology

_CONNECT_S = 3.0


class Spoke:
    """Another rank's side: it sends its reports to rank 0 and waits for instructions.

    Args:
        topology: of this rank; None if its environment contradicts itself: then it only writes a file.
        key: the key of this run.
        folder: where to write what can't be sent; None if it can't be made.
    """

    def __init__(self, topology: Topology | None, key: RunKey, folder: Path | None) -> None:
        self._topology = None if topology is None else exchange.with_free_ports(topology)
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
                    return dict(json.loads((self._folder / exchange.LAST).read_text()))
            time.sleep(exchange.POLL_S)
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
                    self.failures[str(port)] = exchange.kind_of(error)
                    if self.failures[str(port)] != exchange.REFUSED:
                        break  # the other ports would not answer either
                    continue
                if self._is_ours(connection):
                    self._connection = connection
                    return
                self.failures[str(port)] = "held by another program"
                connection.close()
            time.sleep(exchange.POLL_S)

    def _is_ours(self, connection: socket.socket) -> bool:
        nonce = os.urandom(16).hex().encode()
        try:
            connection.sendall(nonce + b"\n")
            self._lines = connection.makefile("rb")
            answer = self._lines.readline(200).strip()
        except OSError:
            return False
        greeting, _, proof = answer.rpartition(b" ")
        return greeting == exchange.GREETING.encode() and self._key.proves(proof, "doctor", nonce)

    def _write(self, message: Mapping[str, Any]) -> bool:
        if self._folder is None:
            return False
        path = self._folder / f"{exchange.REPORT}{message['rank']}-{message['id']}.json"
        with contextlib.suppress(OSError), atomic_write(path) as file:
            file.write(json.dumps(message).encode())
            self._file = path
            return True
        return False
