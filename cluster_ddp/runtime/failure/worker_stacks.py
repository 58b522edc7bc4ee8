"""Where the workers of a rank's loaders are. Imports no torch."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from typing import IO

from cluster_ddp.processes import catches, children
from cluster_ddp.runtime.failure.stacks import of_text, place

# How long workers may take to write their stacks.
_WORKERS_S = 0.3
_SIGNAL = signal.SIGRTMAX - 3  # real-time signals have no other meaning; the last few are seldom used


class WorkerStacks:
    """Asks processes forked from this one where they are. Make it before they are forked: they inherit the handler."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as there are workers
        self._is_ours = signal.getsignal(_SIGNAL) == signal.SIG_DFL
        if self._is_ours:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def places(self) -> tuple[str, ...]:
        """Return file and line of each child that can say it."""
        found = []
        for pid in [pid for pid in children(os.getpid()) if self._is_ours and _catches(pid)]:
            start = os.fstat(self._file.fileno()).st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
            deadline = time.monotonic() + _WORKERS_S
            while os.fstat(self._file.fileno()).st_size == start and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.02)  # the rest of its stack
            text = os.pread(self._file.fileno(), 1 << 16, start).decode(errors="replace")
            at = place(of_text(text))
            if at.where:
                found.append(f"{at.doing.partition(', in ')[2] or at.doing} ({at.where})")
        return tuple(found)

    def close(self) -> None:
        """Remove the handler, and ask nobody from now on."""
        if self._is_ours:
            # The children have the handler still, and the file.
            faulthandler.unregister(_SIGNAL)
            self._is_ours = False
        self._file.close()


def _catches(pid: int) -> bool:
    """Whether the signal does not end a process; False if there is none any more."""
    with contextlib.suppress(OSError):
        return catches(pid, _SIGNAL)
    return False
