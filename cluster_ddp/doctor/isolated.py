"""Run checks in processes of their own, which can be killed: a check may wait for a file system that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Answer = list[Any]
"""What a check returns; it must fit JSON."""


class BrokenError(Exception):
    """A function that raised an exception; its text is that of the exception."""


def run(tasks: Mapping[str, Callable[[], Answer]], limit_s: float) -> dict[str, Answer | BrokenError | None]:
    """Call functions at the same time, each in a forked process, which is killed after the limit.

    Args:
        tasks: name -> function.
        limit_s: seconds that each may take.

    Returns:
        Name -> what the function returned; a `BrokenError` if it raised; None if it did not come back in time.
    """
    started = {name: _start(function) for name, function in tasks.items()}
    deadline = time.monotonic() + limit_s
    return {name: _answer(*child, deadline) for name, child in started.items()}


def _start(function: Callable[[], Answer]) -> tuple[int, int]:
    """The process's id, and the descriptor that its answer comes from."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.close(reading)
            with open(writing, "w", encoding="utf-8") as file:
                try:
                    answer: object = function()
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                json.dump(answer, file)
            status = 0
        os._exit(status)
    os.close(writing)
    return pid, reading


def _answer(pid: int, descriptor: int, deadline: float) -> Answer | BrokenError | None:
    with open(descriptor, "rb") as pipe:
        text = b""
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = os.read(descriptor, 65536)
            text += more
            if not more:
                break
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it has ended, or it never will: a wait in the kernel is left alone
    with contextlib.suppress(ChildProcessError):
        for _ in range(10):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0.01)
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else BrokenError(str(found))
