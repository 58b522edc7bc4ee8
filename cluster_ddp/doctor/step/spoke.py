"""The other ranks' side of the exchange: it sends reports to rank 0 and waits for instructions."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import socket
import threading
import time
from pathlib import Path

from cluster_ddp.agent import threads
from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.agent.secret import Key
from cluster_ddp.doctor.step import exchange
from cluster_ddp.files import atomic_write
from cluster_ddp.runtime.rendezvous import host_network
from cluster_ddp.slurm.topology import Topology

_CONNECT_S, _GREETING_S = 1.5, 4.0
_LONGEST_PAUSE_S = 1.0
# How much later than the others rank 0 may take its own start.
_GRACE_S = 2.0


class Spoke:
    """Another rank's side: it sends its reports to rank 0 and waits for instructions.

    Args:
        topology: of this rank; None if its environment contradicts itself: then it only writes a file.
        key: the key of this run.
        folder: where to write what can't be sent; None if it can't be made.
        wait_s: seconds to wait for rank 0's start.
    """

    def __init__(self, topology: Topology | None, key: Key, folder: Path | None, wait_s: float) -> None:
        self._topology = topology
        self._key, self._folder, self._start_by = key, folder, time.monotonic() + wait_s + _GRACE_S
        self._client: Client | None = None
        self._file: Path | None = None
        self._last: Message = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.failures: dict[str, str] = {}
        """Port of rank 0 -> how the connection failed."""
        self._tries = 0
        self.was_closed = False
        """Whether rank 0's host has closed the connection: then it can be reached, and rank 0 has ended."""

    def start(self, here: Message) -> None:
        """Say that this rank is here, and try to reach rank 0 from now on. Call it once."""
        self.send(here)
        if self._topology is not None:
            threads.start(self._reach, "doctor")

    def send(self, message: Message) -> None:
        """Send a message to rank 0; without a connection, write it to a file, and send it once there is one."""
        with self._lock:
            self._last = message
            if self._client is None:
                self._write()
            else:
                self._send_last(self._client)

    @property
    def is_connected(self) -> bool:
        """Whether it has reached rank 0."""
        return self._client is not None

    def told(self, timeout_s: float, *, unseen_s: float | None = None) -> Message | None:
        """Wait for rank 0's next message; without a connection, for its last. None if none comes.

        Args:
            timeout_s: seconds that rank 0 may take.
            unseen_s: seconds to wait while nothing shows that rank 0 has started; default: until `wait_s` after this
                rank's start.
        """
        now = time.monotonic()
        deadline, start_by = now + timeout_s, self._start_by if unseen_s is None else now + unseen_s
        while time.monotonic() < (deadline if self._knows_rank_0() else min(deadline, start_by)):
            if self._client is not None:
                try:
                    return self._client.hear(deadline - time.monotonic())
                except (OSError, ValueError) as error:
                    self.was_closed = isinstance(error, ConnectionError)
                    return None
            if self._folder is not None:
                with contextlib.suppress(OSError, ValueError):
                    return dict(json.loads((self._folder / exchange.LAST).read_text()))
            time.sleep(exchange.POLL_S)
        return None

    def close(self) -> None:
        """Close the connection; remove the file: rank 0 waits for that."""
        self._closed.set()
        with self._lock:
            self._forget_file()
            if self._client is not None:
                self._client.close()

    def _knows_rank_0(self) -> bool:
        is_here = self._folder is not None and (self._folder / exchange.LEADS).exists()
        return self.is_connected or is_here

    def _reach(self) -> None:
        """Connect to rank 0, which may start later than this rank."""
        pause_s = exchange.POLL_S
        while not self._closed.is_set() and time.monotonic() < self._start_by:
            client = self._connected()
            with self._lock:
                if self._closed.is_set():
                    return
                if client is not None:
                    self._send_last(client)
                    self._client = client
                    return
                self._tries += 1
                self._write()
            self._closed.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)

    def _connected(self) -> Client | None:
        assert self._topology is not None
        is_local = self._topology.num_nodes == 1
        host = host_network.LOOPBACK if is_local else self._topology.master_addr
        for port in self._topology.port_candidates:
            try:
                return exchange.several_tries(functools.partial(self._greeted, host, port))
            except OSError as error:
                kind = self.failures[str(port)] = exchange.kind_of(error)
                if kind not in (exchange.REFUSED, exchange.NO_ANSWER, exchange.HELD):
                    break  # the other ports would not answer either
        return None

    def _greeted(self, host: str, port: int) -> Client:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        try:
            return Client(connection, self._key, _GREETING_S)
        except TimeoutError:
            raise exchange.SilentListenerError from None
        except OSError as error:
            raise OSError(errno.EPROTO, exchange.HELD) from error

    def _send_last(self, client: Client) -> None:
        client.say(**self._last, sent_at=time.time())  # `told` notices that it is closed
        self._forget_file()

    def _forget_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None

    def _write(self) -> None:
        if self._folder is None:
            return
        failures = None if self._topology is None else dict(self.failures)
        message = {**self._last, "failures": failures, "tries": self._tries}
        path = self._folder / f"{exchange.REPORT}{message['rank']}-{message['id']}.json"
        with contextlib.suppress(OSError), atomic_write(path) as file:
            file.write(json.dumps(message).encode())
            self._file = path
