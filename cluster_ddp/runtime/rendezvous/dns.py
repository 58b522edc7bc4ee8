"""Host names and addresses, where name servers may be slow or dead.

A TCPStore looks up the names of its peers' addresses for its log, one after the other. Where no name server answers,
the first look-up takes 10 s (seen, torch 2.15; after one that failed, that process looks up no more).
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Iterator

from cluster_ddp.errors import RendezvousError

_UNKNOWN_NAME_PATIENCE_S = 10.0


def resolve(host: str, deadline: float) -> str:
    """The numeric address of a host.

    Args:
        host: its name or address.
        deadline: when to give up asking servers that don't answer, on the clock of time.monotonic().

    Raises:
        RendezvousError: there is no such host, or nobody could be asked.
    """
    start = time.monotonic()
    while True:
        try:
            # As bytes: of a str, Python makes bytes with the codec for international names, whose import takes 3 ms.
            found = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except socket.gaierror as error:
            # A server that does not answer may yet; one that knows no such name is asked again for a short while only.
            give_up = deadline if error.errno == socket.EAI_AGAIN else min(deadline, start + _UNKNOWN_NAME_PATIENCE_S)
            if time.monotonic() + 1.0 > give_up:
                raise RendezvousError(
                    f"Looking up {host}, the host of rank 0:",
                    f"{error.strerror or error} (asked on {socket.gethostname()}).",
                    f"is MASTER_ADDR right? Try: getent hosts {host}",
                ) from error
            time.sleep(1.0)


class ReverseLookup:
    """A look-up of the name of an address, under way while other things are done, to see how long that takes."""

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
        """Whether it takes at most so many seconds from its start; waits that long if need be."""
        self._thread.join(max(0.0, self._start + patience_s - time.monotonic()))
        return not self._thread.is_alive()


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Inside, the look-ups of this thread, and of no other, end with /etc/hosts.

    glibc keeps a resolver state for each thread, whose first two fields are the time-out and the number of attempts
    (resolver(3), struct __res_state). RES_OPTIONS would do for a whole process only, and only before its first look-up.
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
