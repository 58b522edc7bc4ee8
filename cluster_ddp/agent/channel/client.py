"""A task's side of the channel."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Mapping

from cluster_ddp.agent.channel import sockets
from cluster_ddp.agent.channel.lines import CHUNK, LONGEST_LINE, SEND_S, Key, Lines, Message, new_nonce
from cluster_ddp.protocol import Env

# Firewalls forget a connection on which nothing is said: in clouds, after some minutes.
_KEEP_ALIVE_S = 60
_ANOTHER_KEY = re.compile(rb"[0-9a-f]{32} [0-9a-f]{64}")


class Client:
    """A task's side.

    Args:
        connection: to the server; None for none: then nothing is said.
        key: the job's key.
        timeout_s: seconds that the server may take to answer.

    Raises:
        OSError: another program listens there, whose first words it has; socket.timeout: nothing is answered. The
            connection is then closed.
    """

    def __init__(self, connection: socket.socket | None, key: Key, timeout_s: float = 5.0) -> None:
        self._connection, self._rest = connection, b""
        self.always: dict[str, object] = {}
        """What each message has."""
        if connection is None:
            return
        nonce = new_nonce()
        try:
            connection.settimeout(timeout_s)
            connection.sendall(nonce + b"\n")
            line = self._line(timeout_s)
            theirs, _, proof = line.partition(b" ")
            nonces = nonce + b" " + theirs
            if not key.proves(proof, "channel", nonces):
                raise ConnectionAbortedError(_who_says(line))
        except OSError:
            connection.close()
            raise
        self._lines = Lines(key, nonces, "task", "server")

    @staticmethod
    def of_job(env: Mapping[str, str]) -> Client:
        """Connect to the job's agent. If it can't be reached, stay silent: srun still reports the exit status."""
        host, _, port = env.get(Env.CHANNEL, "").rpartition(":")
        key = Key.of_job(env)
        if host:
            with contextlib.suppress(OSError, ValueError):
                connection = socket.create_connection((host, int(port)), timeout=5.0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
                client = Client(connection, key)
                client.always = {"start": int(env.get(Env.START, "0"))}
                return client
        return Client(None, key)

    @property
    def is_connected(self) -> bool:
        """Whether the server was reached."""
        return self._connection is not None

    def notice(self) -> None:
        """See `sockets.notice`."""
        if self._connection is not None:
            sockets.notice(self._connection)

    def say(self, kind: str, **fields: object) -> None:
        """Send a message. Nothing happens if it can't be sent."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.settimeout(SEND_S)
                self._connection.sendall(self._lines.seal({"kind": kind, **self.always, **fields}))

    def hear(self, timeout_s: float) -> Message:
        """Wait for the next message of the server.

        Raises:
            ConnectionError: the server has ended.
            OSError: there is no message in time.
            ValueError: it is not sealed with the key.
        """
        line = self._line(timeout_s)
        return self._lines.open(line)

    def close(self) -> None:
        """End the connection: the server then knows that nothing more comes."""
        if self._connection is not None:
            self._connection.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self._connection is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            heard = self._connection.recv(CHUNK)
            if not heard or len(self._rest) > LONGEST_LINE:
                raise ConnectionResetError("closed by the server")
            self._rest += heard
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _who_says(line: bytes) -> str:
    """Who listens there, by the first line, in printable characters."""
    if _ANOTHER_KEY.fullmatch(line):
        return "another run, or one with another secret"
    return "".join(letter if letter.isprintable() else " " for letter in line.decode(errors="replace")).strip()[:80]
