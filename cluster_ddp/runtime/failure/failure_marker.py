"""The failure marker: a file in which the first rank that fails says what failed, for the end of the job's log.

Its first line names the rank, its node and the error; the second line, "status N", is added when the rank has ended:
by the shell that started it, or by the process that forked it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.contract import Env
from cluster_ddp.errors import ClusterDDPError, printable
from cluster_ddp.files import open_own
from cluster_ddp.runtime.failure import start_log

_LONGEST = 300


def note(env: Mapping[str, str], rank: int | str, host: str, error: BaseException | str | None = None) -> None:
    """Make the marker, unless a rank has done so. If it can't be written, nothing is said: the error itself is printed.

    Args:
        env: an environment, such as os.environ; without `Env.FAILED` there, nothing is done.
        rank: the rank that failed.
        host: its host.
        error: why, in words or as an exception; None if only its exit status is known.
    """
    if not (path := env.get(Env.FAILED)):
        return
    words = f"rank {rank} on {host}" + (f": {_words(error)}" if error is not None else "")
    with contextlib.suppress(OSError):
        descriptor = open_own(Path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{words}\n")
        start_log.note_failure(env, f"Failed first: {words}")


def wait(env: Mapping[str, str], patience_s: float) -> None:
    """Wait for the marker of another rank, which may have failed just before."""
    path, deadline = env.get(Env.FAILED), time.monotonic() + patience_s
    while path and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def note_status(env: Mapping[str, str], rank: int, host: str, status: int, *, is_oom: bool = False) -> None:
    """Add the exit status of a rank that has ended, if it was the first that failed. See `note`.

    Args:
        env: an environment.
        rank: the rank.
        host: its host.
        status: its exit status; 128 + N if signal N has ended it.
        is_oom: whether the kernel has killed a process of it for memory.
    """
    if is_oom and status == 128 + signal.SIGKILL:
        how = "killed by the kernel for memory"
    elif status - 128 in {*signal.Signals} - {signal.SIGABRT}:  # the others end a process without a word
        how = f"killed by {signal.Signals(status - 128).name}"
    else:
        how = None
    note(env, rank, host, how)
    if path := env.get(Env.FAILED):
        with contextlib.suppress(OSError):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            if len(lines) == 1 and lines[0].partition(":")[0] == f"rank {rank} on {host}":
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"status {status}\n")


def _words(error: BaseException | str) -> str:
    """An error in one line."""
    if isinstance(error, str):
        text = error
    elif isinstance(error, ClusterDDPError):
        text = f"{error.asked} {error.found}"
    else:
        text = traceback.format_exception_only(error)[-1]
    return printable(" ".join(text.split()))[:_LONGEST]
