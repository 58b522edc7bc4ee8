"""Signal handlers that tests change in the process that runs them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@contextmanager
def put_back() -> Iterator[None]:
    """Put them back in the end, with the blocked signals: processes of later tests begin with what is left here."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
