"""Sealed lines over TCP, between the tasks of a job and its agent on the batch host; or a step's ranks and rank 0.

    task to server: NONCE, hexadecimal digits, once
    server to task: NONCE MAC, once: it proves that the server has the key, too
    both ways: MAC JSON, as often as there is something to say

MAC is HMAC-SHA256, with the job's key, of both nonces, and then of the number of the line and its JSON. So nobody
without the job's secret can speak for a task or for the server, or repeat what they have said. What they say is not
secret. The key is made of the job's secret, which is new each time that the job begins (restarts in its allocation keep
it), and in the environment of its tasks. No process sends it: others see only HMACs, each for one purpose.

Here is the side of a task, or of a rank; that of the job, or of rank 0, is in `channel_server`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from cluster_ddp.run.names import Env

Message = dict[str, Any]
"""What is said: it has a `kind`."""

LONGEST_LINE = 1 << 20
CHUNK = 1 << 16
SEND_S = 5.0
"""How long a message may take to be sent, where the other side does not read."""
# Firewalls forget a connection on which nothing is said: in clouds, after some minutes.
_KEEP_ALIVE_S = 60
# A machine that is gone does not end its connections: the kernels then ask each second, and it has missed three.
_SILENT_S, _MISSES = 1, 3
_ANOTHER_KEY = re.compile(rb"[0-9a-f]{32} [0-9a-f]{64}")


class Key:
    """A key made of a secret.

    Args:
        secret: the job's secret; if empty, anybody can compute the key.
        run: a text that differs between those who share a secret but not the key.
    """

    def __init__(self, secret: bytes, run: str = "") -> None:
        self.is_secret = bool(secret)
        """Whether it is made of a secret."""
        self._key = hmac.digest(secret, run.encode(), "sha256")

    @staticmethod
    def of_job(env: Mapping[str, str]) -> Key:
        """Return the key of the job that an environment belongs to, by its `Env.SECRET`."""
        return Key(os.fsencode(env.get(Env.SECRET, "")))

    def derived(self, purpose: str) -> Key:
        """Return a key for one purpose. It proves nothing to those who use the key for another one."""
        return Key(self._key, purpose)

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of some parts for a purpose, in hexadecimal digits.

        Args:
            purpose: so that an HMAC for one purpose is useless for another.
            parts: only the last one may contain line breaks.
        """
        return hmac.digest(self._key, b"\n".join([purpose.encode(), *parts]), "sha256").hex().encode()

    def proves(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Return whether `mac` is the HMAC of the parts for the purpose, in constant time."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))


class Lines:
    """The lines of a connection, as one side writes and reads them."""

    def __init__(self, key: Key, nonces: bytes, own: str, other: str) -> None:
        self._key, self._nonces, self._own, self._other = key, nonces, own, other
        self._written = self._read = 0

    def seal(self, message: Message) -> bytes:
        """Return the line of a message."""
        text = json.dumps(message).encode()
        self._written += 1
        return self._key.mac(self._own, self._nonces, b"%d" % self._written, text) + b" " + text + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message of a line.

        Raises:
            ValueError: the line is not sealed with the key, or out of order.
        """
        mac, _, text = line.partition(b" ")
        self._read += 1
        if not self._key.proves(mac, self._other, self._nonces, b"%d" % self._read, text):
            raise ValueError("a line that is not sealed")
        return dict(json.loads(text))


def new_nonce() -> bytes:
    """Return what a side begins with: so nobody can repeat what was said on another connection."""
    return os.urandom(16).hex().encode()


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
        """See `notice`."""
        if self._connection is not None:
            notice(self._connection)

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


def notice(connection: socket.socket) -> None:
    """Let a connection end soon after the other machine was cut off: then who reads it gets an error (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MISSES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_SILENT_S + _MISSES) * 1000)
