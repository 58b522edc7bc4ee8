"""Sealed lines over TCP, between the tasks of a job and its agent on the batch host; or a step's ranks and rank 0.

    task to server    NONCE                                   once, hexadecimal digits
    server to task    NONCE MAC                               once: it proves that the server has the key, too
    both              MAC JSON                                as often as there is something to say

MAC is HMAC-SHA256, with the job's key, of both nonces, and then of the number of the line and its JSON. So nobody
without the job's secret can speak for a task or for the server, or repeat what they have said. What they say is not
secret.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster_ddp.agent import threads
from cluster_ddp.agent.secret import Key
from cluster_ddp.contract import Env

Message = dict[str, Any]
"""What is said: it has a `kind`."""
Hear = Callable[[Message], None]

_LONGEST_LINE = 1 << 20
_CHUNK = 1 << 16
_BACKLOG = 4096
# How long a message may take to be sent, where the other side does not read.
_SEND_S = 5.0
# Whoever has said nothing by then is no task of the job.
_HELLO_S = 10.0
# Firewalls forget a connection on which nothing is said: in clouds, after some minutes.
_KEEP_ALIVE_S = 60
# A machine that is gone does not end its connections: the kernels then ask each second, and it has missed three.
_SILENT_S, _MISSES = 1, 3


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on all interfaces, on the first free one of some ports; without any, on any port.

    Raises:
        OSError: none is free.
    """
    for port in ports:
        with contextlib.suppress(OSError):
            return listener(port)
    return listener(0)


def listen_here() -> socket.socket:
    """Return a socket that listens on this machine only, on any port."""
    return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)


def listener(port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, on a port; 0 for any.

    Raises:
        OSError: it is not free.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel may have it switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def notice(connection: socket.socket) -> None:
    """Let a connection end soon after the other machine was cut off: then who reads it gets an error (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MISSES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_SILENT_S + _MISSES) * 1000)


class _Lines:
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


class Server:
    """The job's side: one thread hears all tasks.

    Args:
        listener: a socket that listens.
        key: the job's key.
        hear: called in that thread with each message. The first of a connection is its "hello". If it raises
            ValueError or KeyError, the connection is closed.
        gone: called in that thread with the "hello" of a connection that has ended.
        notices: whether a connection ends some seconds after its machine was cut off.
    """

    def __init__(self, listener: socket.socket, key: Key, hear: Hear, gone: Hear, *, notices: bool = False) -> None:
        self._listener, self._key, self._hear, self._gone, self._notices = listener, key, hear, gone, notices
        self._selector = selectors.DefaultSelector()
        self._callers: set[_Caller] = set()
        self._strangers: list[_Caller] = []  # some of them: who has said nothing yet
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

    def tell(self, kind: str, **fields: object) -> None:
        """Send a message to all who have said something. Call it in one thread only."""
        with self._quiet:
            callers = list(self._callers)
        for caller in callers:
            if caller.lines is not None and caller.hello is not None:
                with contextlib.suppress(OSError):  # it has ended, which is noticed elsewhere
                    caller.connection.sendall(caller.lines.seal({"kind": kind, **fields}))

    def drain(self, timeout_s: float) -> None:
        """Wait until all connections have ended, so that all was heard; at most so many seconds."""
        with self._quiet:
            self._quiet.wait_for(lambda: not self._callers, timeout_s)

    def close(self) -> None:
        """End the thread and all connections."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._drop_strangers(time.monotonic() - _HELLO_S)
            for key, _ in self._selector.select(_HELLO_S if self._strangers else None):
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # if no file can be opened, another try would fail, too
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_strangers(time.monotonic()):
                time.sleep(0.1)
            return
        connection.settimeout(_SEND_S)
        if self._notices:
            notice(connection)
        caller = _Caller(connection)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        with self._quiet:
            self._callers.add(caller)
            self._strangers.append(caller)

    def _drop_strangers(self, since: float) -> int:
        """Drop who was silent since then: anybody can connect. Returns how many."""
        self._strangers = [one for one in self._strangers if one in self._callers and one.hello is None]
        silent = [one for one in self._strangers if one.connected_at <= since]
        for one in silent:
            self._drop(one)
        return len(silent)

    def _read(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # it has just been dropped
        try:
            heard = caller.connection.recv(_CHUNK)
            *lines, caller.rest = (caller.rest + heard).split(b"\n")
            for line in lines:
                self._take(caller, line)
            if not heard or len(caller.rest) > (_CHUNK if caller.hello is None else _LONGEST_LINE):
                self._drop(caller)
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(caller)

    def _take(self, caller: _Caller, line: bytes) -> None:
        if caller.lines is None:
            nonce = _nonce()
            nonces = line + b" " + nonce
            caller.lines = _Lines(self._key, nonces, "server", "task")
            caller.connection.sendall(nonce + b" " + self._key.mac("channel", nonces) + b"\n")
        else:
            message = caller.lines.open(line)
            caller.hello = caller.hello or message
            self._hear(message)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.hello is not None:
            self._gone(caller.hello)
        with self._quiet:
            self._callers.remove(caller)
            self._quiet.notify_all()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


class _Caller:
    """A connection of a task."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.rest, self.connected_at = connection, b"", time.monotonic()
        self.lines: _Lines | None = None
        self.hello: Message | None = None


class Client:
    """A task's side.

    Args:
        connection: to the server; None for none: then nothing is said.
        key: the job's key.
        timeout_s: seconds that the server may take to answer.

    Raises:
        OSError: another program listens there; socket.timeout: nothing is answered. The connection is then closed.
    """

    def __init__(self, connection: socket.socket | None, key: Key, timeout_s: float = 5.0) -> None:
        self._connection, self._rest = connection, b""
        self.always: dict[str, object] = {}
        """What each message has."""
        if connection is None:
            return
        nonce = _nonce()
        try:
            connection.settimeout(timeout_s)
            connection.sendall(nonce + b"\n")
            theirs, _, proof = self._line(timeout_s).partition(b" ")
            nonces = nonce + b" " + theirs
            if not key.proves(proof, "channel", nonces):
                raise ConnectionAbortedError("another program listens there")
        except OSError:
            connection.close()
            raise
        self._lines = _Lines(key, nonces, "task", "server")

    @staticmethod
    def of_job(env: Mapping[str, str]) -> Client:
        """Connect to the job's agent. If it can't be reached, stay silent: srun still reports the exit status.

        Args:
            env: the environment of a task, with `Env.CHANNEL` and `Env.SECRET`.
        """
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
                self._connection.settimeout(_SEND_S)
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
            heard = self._connection.recv(_CHUNK)
            if not heard or len(self._rest) > _LONGEST_LINE:
                raise ConnectionResetError("closed by the server")
            self._rest += heard
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _nonce() -> bytes:
    return os.urandom(16).hex().encode()
