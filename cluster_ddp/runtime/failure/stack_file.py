"""Stacks by faulthandler: of this rank in the run directory, also when it is stuck in C, and of loaders' workers.

faulthandler has one watchdog (dump_traceback_later) and one handler of fatal signals for a process. The watchdog is
armed once there is a run directory; the handler is left alone if the script has enabled its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from cluster_ddp.files import is_at
from cluster_ddp.processes import catches
from cluster_ddp.runtime.failure import stacks
from cluster_ddp.runtime.run_dir.fenced_writes import open_own

_HEAD_BYTES = 2048
# How long workers may take to write their stacks.
_WORKERS_S = 0.3
# Real-time signals have no other meaning; the last few are seldom used.
_SIGNAL = signal.SIGRTMAX - 3


class StackFile:
    """The file of one rank: one line of JSON, of a fixed length, that is written again and again; then stacks.

    Args:
        path: of the file; a former one is emptied.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_wanted = path, False
        self._head = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._end = open_own(path, os.O_WRONLY | os.O_APPEND)
        # The watchdog can't call `sync`, and an NFS client may write half a minute late.
        self._watchdogs = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_DSYNC)
        self._is_armed, self._handles_faults = False, not faulthandler.is_enabled()
        if self._handles_faults:
            faulthandler.enable(self._end)

    def write(self, line: str) -> None:
        """Replace the first line."""
        os.pwrite(self._head, line.encode()[: _HEAD_BYTES - 1].ljust(_HEAD_BYTES - 1) + b"\n", 0)

    def dump(self) -> None:
        """Append the stacks of all threads."""
        self.is_wanted = True
        os.write(self._end, time.strftime(f"\n{stacks.ANSWERED} %Y-%m-%dT%H:%M:%S\n").encode())
        faulthandler.dump_traceback(self._end)

    def sync(self) -> None:
        """Let other nodes see what was written, on a file system that writes late."""
        os.fsync(self._head)

    def take_stderr(self) -> None:
        """Append what C and C++ code writes to stderr from now on; what Python writes goes where it went."""
        stream: Any = sys.__stderr__
        if stream is None:
            return
        raw = getattr(stream.buffer, "raw", stream.buffer)  # without a buffer under PYTHONUNBUFFERED
        if raw.fileno() == 2:  # else it was done before
            stream.flush()
            raw.__init__(os.dup(2), "w", closefd=False)  # the same object: handlers of logging hold it
            os.dup2(self._end, 2)

    def arm(self, timeout_s: float) -> None:
        """Append the stacks in this time, by a thread that needs no Python, unless it is armed again before."""
        self._is_armed = True
        faulthandler.dump_traceback_later(timeout_s, file=self._watchdogs)

    def close(self) -> None:
        """Stop writing, and remove the file unless there was a hang."""
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()
        if self._handles_faults:
            faulthandler.disable()
        with contextlib.suppress(OSError):
            if not self.is_wanted and is_at(self._head, self.path):  # else it is a newer start's
                self.path.unlink()
        for descriptor in (self._head, self._end, self._watchdogs):
            os.close(descriptor)


class WorkerStacks:
    """Asks processes forked from this one where they are. Make it before they are forked: they inherit the handler."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as there are workers
        self._is_ours = signal.getsignal(_SIGNAL) == signal.SIG_DFL
        if self._is_ours:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def places(self) -> tuple[str, ...]:
        """Return file and line of each child that can say it."""
        asked = [pid for pid in _children() if self._is_ours and _catches(pid)]
        found = []
        for pid in asked:
            start = os.fstat(self._file.fileno()).st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
            deadline = time.monotonic() + _WORKERS_S
            while os.fstat(self._file.fileno()).st_size == start and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.02)  # the rest of its stack
            text = os.pread(self._file.fileno(), 1 << 16, start).decode(errors="replace")
            place = stacks.place(stacks.of_text(text))
            if place.where:
                found.append(f"{place.doing.partition(', in ')[2] or place.doing} ({place.where})")
        return tuple(found)

    def close(self) -> None:
        """Remove the handler, and ask nobody from now on."""
        if self._is_ours:
            # The children have the handler still, and the file.
            faulthandler.unregister(_SIGNAL)
            self._is_ours = False
        self._file.close()


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by a signal or a debugger."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _catches(pid: int) -> bool:
    """Whether the signal does not end a process; False if there is none any more."""
    with contextlib.suppress(OSError):
        return catches(pid, _SIGNAL)
    return False


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
