"""Host names and addresses, even if name servers are slow or dead.

For its log, a TCPStore looks up the names of its peers' addresses, one after the other. If no name server answers, the
first look-up takes 10 s (seen with torch 2.15; after a failed one, that process looks up no more).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator

from cluster_ddp.errors import RendezvousError
from cluster_ddp.slurm.variables import node_name

_UNKNOWN_NAME_PATIENCE_S = 10.0


def resolve(host: str, deadline: float) -> str:
    """Return the numeric address of a host.

    Args:
        host: its name or address.
        deadline: when to give up on servers that don't answer, on the clock of time.monotonic(). An unknown name is
            given up after 10 s.

    Raises:
        RendezvousError: the name is unknown, or no name server answered.
    """
    start = time.monotonic()
    while True:
        try:
            # As bytes: Python would encode a str with the codec for international names, whose import takes 3 ms.
            found = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except socket.gaierror as error:
            # A server that does not answer may answer later; an unknown name is tried again for a short time only.
            give_up = deadline if error.errno == socket.EAI_AGAIN else min(deadline, start + _UNKNOWN_NAME_PATIENCE_S)
            if time.monotonic() + 1.0 > give_up:
                raise RendezvousError(
                    f"Looking up {host}, the host of rank 0:",
                    f"{error.strerror or error} (asked on {node_name(os.environ)}).",
                    f"check MASTER_ADDR; try: getent hosts {host}",
                ) from error
            time.sleep(1.0)


class ReverseLookup:
    """Looks up the name of an address in a thread, to measure how long that takes.

    Args:
        address: numeric, IPv4 or IPv6.
    """

    def __init__(self, address: str) -> None:
        # In the form that the address of a peer has on a TCPStore's dual-stack socket.
        self._address = address if ":" in address else f"::ffff:{address}"
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            socket.getnameinfo((self._address, 0), socket.NI_NAMEREQD)

    def ends_within(self, patience_s: float) -> bool:
        """Return whether it ends within this many seconds of its start; wait that long if necessary."""
        self._thread.join(max(0.0, self._start + patience_s - time.monotonic()))
        return not self._thread.is_alive()


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """During the body, look-ups of this thread, but of no other, use only /etc/hosts.

    glibc keeps a resolver state for each thread. Its first two fields are the timeout and the number of attempts
    (resolver(3), struct __res_state). RES_OPTIONS would apply to the whole process, and only before its first look-up.
    Has no effect with another C library.
    """
    libc = ctypes.CDLL(None)
    try:
        libc.__res_init()
        libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        state = libc.__res_state()
    except AttributeError:  # another C library
        yield
        return
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts
