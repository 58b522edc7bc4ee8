"""The end of a rank: like Python's own, but without finalizing torch's modules.

Python's finalization visits every object, which takes a second of CPU time with torch. In a forked rank it writes to
every object, so the kernel would copy all imported modules for every rank: 64 ranks on two cores were done after 12 s,
but ended after 143 s.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

_STATUS_OF_LOST_OUTPUT = 120  # as in Python (sys.exit)


def after(run: Callable[[], None], shared: Mapping[str, ModuleType] | None = None) -> NoReturn:
    """Run a function, then end the process: wait for threads, run exit handlers, drop its own modules, flush output.

    The function's SystemExit gives the exit status; any other exception ends the process as usual. `shared` modules are
    from before the fork, and are not dropped; by default none is, for a program that needs no destructors.
    """
    status = 0
    try:
        run()
    except SystemExit as error:
        status = _status(error.code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    if shared is not None:
        threading.excepthook = lambda arguments: None  # daemon threads lose their modules now
        _drop([name for name, module in sys.modules.items() if module is not shared.get(name)])
    is_written = [_is_written(stream) for stream in (sys.stdout, sys.stderr)]
    if not all(is_written):
        status = status or _STATUS_OF_LOST_OUTPUT
    os._exit(status)


def _drop(names: Sequence[str]) -> None:
    """Drop modules and their objects, so that open files are flushed and destructors run."""
    modules = [weakref.ref(sys.modules.pop(name)) for name in reversed(names)]
    _flush_files()
    gc.collect()
    for module in modules:
        if (left := module()) is not None:  # something else refers to it
            vars(left).clear()
    gc.collect()


def _flush_files() -> None:
    """Flush what this rank has opened. Collecting garbage may close a file before the buffer above it is written."""
    for one in gc.get_objects():  # without those that were frozen before the fork
        if issubclass(type(one), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or its disk is full
                one.flush()


def _status(code: object) -> int:
    """The exit status after sys.exit(code)."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _is_written(stream: object) -> bool:
    try:
        if stream is not None and not stream.closed:  # type: ignore[attr-defined]  # a script may set its own
            stream.flush()  # type: ignore[attr-defined]
    except Exception:
        return False
    return True
