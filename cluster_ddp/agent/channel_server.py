"""The job's side of the channel, or rank 0's; and the sockets that listen."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Optional

from cluster_ddp import processes
from cluster_ddp.agent.channel import CHUNK, LONGEST_LINE, SEND_S, Key, Lines, Message, new_nonce, notice

Hear = Callable[[Message], Optional[Message]]
Gone = Callable[[Message], object]

# Whoever has said nothing by then is no task of the job.
_HELLO_S = 10.0
_BACKLOG = 4096


class Server:
    """The job's side: one thread hears all tasks.

    Args:
        listener: a socket that listens.
        key: the job's key.
        hear: called in that thread with each message. The first of a connection is its "hello". What it returns is
            the answer (without `tell`). If it raises ValueError or KeyError, the connection is closed.
        gone: called in that thread with the "hello" of a connection that has ended.
        notices: whether a connection ends some seconds after its machine was cut off.
        most_strangers: how many may be connected that have said nothing yet. The oldest is then closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        hear: Hear,
        gone: Gone,
        *,
        notices: bool = False,
        most_strangers: int = sys.maxsize,
    ) -> None:
        self._listener, self._key, self._hear, self._gone, self._notices = listener, key, hear, gone, notices
        self._most_strangers = most_strangers
        self._selector = selectors.DefaultSelector()
        self._callers: set[_Caller] = set()
        self._strangers: list[_Caller] = []  # some of them: who has said nothing yet
        self._quiet = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = processes.start_thread(self._serve, "channel")

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
        connection.settimeout(SEND_S)
        if self._notices:
            notice(connection)
        caller = _Caller(connection)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        with self._quiet:
            self._callers.add(caller)
            self._strangers.append(caller)

    def _drop_strangers(self, since: float) -> int:
        """Drop who was silent since then, or is too many: anybody can connect. Returns how many."""
        self._strangers = [one for one in self._strangers if one in self._callers and one.hello is None]
        too_many = len(self._strangers) - self._most_strangers
        silent = [one for at, one in enumerate(self._strangers) if at < too_many or one.connected_at <= since]
        for one in silent:
            self._drop(one)
        return len(silent)

    def _read(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # it has just been dropped
        try:
            heard = caller.connection.recv(CHUNK)
            *lines, caller.rest = (caller.rest + heard).split(b"\n")
            for line in lines:
                self._take(caller, line)
            if not heard or len(caller.rest) > (CHUNK if caller.hello is None else LONGEST_LINE):
                self._drop(caller)
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(caller)

    def _take(self, caller: _Caller, line: bytes) -> None:
        if caller.lines is None:
            nonce = new_nonce()
            nonces = line + b" " + nonce
            caller.lines = Lines(self._key, nonces, "server", "task")
            caller.connection.sendall(nonce + b" " + self._key.mac("channel", nonces) + b"\n")
        else:
            message = caller.lines.open(line)
            caller.hello = caller.hello or message
            if answer := self._hear(message):
                caller.connection.sendall(caller.lines.seal(answer))

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
        self.lines: Lines | None = None
        self.hello: Message | None = None


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
