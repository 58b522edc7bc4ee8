"""Sealed lines over TCP, from the tasks of a job to its agent on the batch host.

    server to task    NONCE                                   once, 32 hexadecimal digits
    task to server    MAC JSON                                as often as there is something to say

MAC is HMAC-SHA256, with the job's secret as the key, of the nonce, the number of the line and its JSON. So nobody
without the secret can speak for a rank, or repeat what a rank has said. What a task says is not secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cluster_ddp.agent import threads

Message = dict[str, Any]
"""What a task says: it has a `kind`."""

_LONGEST_LINE = 1 << 16
_CONNECT_S = 5.0


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on all interfaces, on the first free one of some ports; without any, on any port.

    Raises:
        OSError: none is free.
    """
    for port in ports:
        with contextlib.suppress(OSError):
            return _listener(port)
    return _listener(0)


def listen_here() -> socket.socket:
    """Return a socket that listens on this machine only, on any port."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel may have it switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


class Server:
    """The job's side: one thread hears all tasks.

    Args:
        listener: a socket that listens.
        secret: the job's secret.
        hear: called in that thread with each message. The first of a connection is its "hello".
        gone: called in that thread with the "hello" of a connection that has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        hear: Callable[[Message], None],
        gone: Callable[[Message], None],
    ) -> None:
        self._listener, self._secret, self._hear, self._gone = listener, secret, hear, gone
        self._selector = selectors.DefaultSelector()
        self._open = 0
        self._quiet = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threads.start(self._serve, "channel")

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    def drain(self, timeout_s: float) -> None:
        """Wait until all connections have ended, so that all was heard; at most so many seconds."""
        with self._quiet:
            self._quiet.wait_for(lambda: self._open == 0, timeout_s)

    def close(self) -> None:
        """End the thread and all connections."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            caller = _Caller(connection)
            connection.sendall(caller.nonce + b"\n")
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, caller)
            with self._quiet:
                self._open += 1

    def _read(self, caller: _Caller) -> None:
        try:
            heard = caller.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        *lines, caller.rest = (caller.rest + heard).split(b"\n")
        is_sound = bool(heard) and len(caller.rest) < _LONGEST_LINE
        for line in lines:
            message = caller.opened(line, self._secret)
            if message is None:
                is_sound = False
                break
            self._hear(message)
        if not is_sound:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.hello is not None:
            self._gone(caller.hello)
        with self._quiet:
            self._open -= 1
            self._quiet.notify_all()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


class _Caller:
    """A connection of a task."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.nonce = connection, os.urandom(16).hex().encode()
        self.rest = b""
        self.hello: Message | None = None
        self._lines = 0

    def opened(self, line: bytes, secret: bytes) -> Message | None:
        """The message of a line; None if it is not sealed with the secret."""
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, _mac(secret, self.nonce, self._lines, text)):
            return None
        self._lines += 1
        try:
            message = dict(json.loads(text))
        except ValueError:
            return None
        self.hello = self.hello or message
        return message


class Client:
    """A task's side. If the job can't be reached, it stays silent: srun still reports the task's exit status.

    Args:
        address: "host:port" of the job's agent; empty for none.
        secret: the job's secret.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret, self._lines = secret, 0
        self._connection: socket.socket | None = None
        host, _, port = address.rpartition(":")
        if not host:
            return
        with contextlib.suppress(OSError, ValueError):
            self._connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            self._nonce = b""
            while not self._nonce.endswith(b"\n"):
                heard = self._connection.recv(64)
                if not heard:
                    raise OSError
                self._nonce += heard
            self._nonce = self._nonce.strip()
            return
        self._connection = None

    @property
    def is_connected(self) -> bool:
        """Whether the job was reached."""
        return self._connection is not None

    def say(self, kind: str, **fields: object) -> None:
        """Send a message. Nothing happens if it can't be sent."""
        if self._connection is None:
            return
        text = json.dumps({"kind": kind, **fields}).encode()
        with contextlib.suppress(OSError):
            self._connection.sendall(_mac(self._secret, self._nonce, self._lines, text) + b" " + text + b"\n")
            self._lines += 1

    def close(self) -> None:
        """End the connection: the job then knows that nothing more comes."""
        if self._connection is not None:
            self._connection.close()


def _mac(secret: bytes, nonce: bytes, line: int, text: bytes) -> bytes:
    return hmac.new(secret, b"%b %d %b" % (nonce, line, text), "sha256").hexdigest().encode()
