"""Run checks in forked processes, which can be killed: a check may wait for a file system that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Task = Callable[[], Iterable[Any]]
"""What is run: its items must fit JSON. A text says what it does from now on, such as the name of a check."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a task has given until its end."""

    items: list[Any]
    """What it gave, without texts."""
    doing: str = ""
    """Its last text: what it did when it broke off."""
    failure: str | None = None
    """Why it broke off: what it raised, or which signal ended its process; None if it did not."""
    is_late: bool = False
    """Whether it did not come back in time."""


class Running:
    """Tasks, by name, that run at the same time, each in a process of its own."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._children = {name: _start(task) for name, task in tasks.items()}

    def results(self, limit_s: float) -> dict[str, Result]:
        """Return what each task gives in this time, by name, then kill them."""
        deadline = time.monotonic() + limit_s
        return {name: _result(*child, deadline) for name, child in self._children.items()}


def _start(task: Task) -> tuple[int, int]:
    """Return the process's id, and the descriptor that its items come from."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            _close_all_but(writing)
            with open(writing, "w", encoding="utf-8") as file:
                error = None
                try:
                    for item in task():
                        print(json.dumps({"item": item}), file=file, flush=True)
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
                print(json.dumps({"error": error}), file=file, flush=True)
            status = 0
        os._exit(status)
    os.close(writing)
    return pid, reading


def _close_all_but(descriptor: int) -> None:
    """Close what was inherited: connections of this rank must end with it, also while this process hangs."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > 2 and int(path.name) != descriptor:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(path.name))


def _result(pid: int, descriptor: int, deadline: float) -> Result:
    text, is_late = b"", True
    with open(descriptor, "rb") as pipe, selectors.DefaultSelector() as selector:  # of any number of open files
        selector.register(pipe, selectors.EVENT_READ)
        while is_late and selector.select(max(0.0, deadline - time.monotonic())):
            more = os.read(descriptor, 65536)
            text += more
            is_late = bool(more)
    ending = _wait(pid, kill=is_late)
    whole = text[: text.rfind(b"\n") + 1]  # killed in the middle of a line
    lines = [json.loads(line) for line in whole.splitlines()]
    items = [line["item"] for line in lines if "item" in line]
    failure = None
    if not is_late:
        failure = lines[-1]["error"] if lines and "error" in lines[-1] else f"its process ended: {ending}"
    doing = next((item for item in reversed(items) if isinstance(item, str)), "")
    return Result([item for item in items if not isinstance(item, str)], doing, failure, is_late)


def _wait(pid: int, *, kill: bool) -> str:
    """Wait for a process's end. Returns it in words. A process that waits in the kernel is left alone."""
    if kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        for _ in range(10 if kill else 100):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            time.sleep(0.01)
    return "unknown"
