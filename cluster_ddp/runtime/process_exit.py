"""The end of a rank's process without Python's finalization: as Python would end, or at once. Imports no torch.

Python's finalization visits every object, which takes a second of CPU time with torch. In a forked rank it writes to
every object, so the kernel would copy all imported modules for every rank: 64 ranks on two cores were done after 12 s,
but ended after 143 s. After a failure it may take forever: destructors of CUDA and NCCL wait for kernels, and kernels
wait for ranks that are gone.
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
from types import MethodType, ModuleType
from typing import NoReturn

from cluster_ddp.runtime.live_objects import objects_of

_PATIENCE_S = 60.0  # a file system that hangs must not keep the process
_STATUS_OF_LOST_OUTPUT = 120  # as in Python (sys.exit)

_FILES = io.IOBase.__mro__[1]  # in C: the base of all, also of those that io.IOBase only registers

_before_now: list[weakref.WeakMethod[Callable[[], object]]] = []


def before_now(method: Callable[[], object]) -> None:
    """Let `now` call a bound method first, which saves what must not be lost, unless its object is gone by then.

    It must not need the GPU.
    """
    assert isinstance(method, MethodType)
    _before_now.append(weakref.WeakMethod(method))


def now(status: int) -> NoReturn:
    """End the process with a status, after the methods of `before_now` (at most 60 s). Callable from any thread.

    Output that can't be written does not change the status: what was stopped in time, or finished, stays so.
    """
    keeping = threading.Thread(target=_keep, daemon=True)
    keeping.start()
    keeping.join(_PATIENCE_S)
    _is_output_written()
    os._exit(status)


def _keep() -> None:
    for reference in _before_now:
        if (method := reference()) is not None:
            with contextlib.suppress(Exception):
                method()


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
    is_written = _is_output_written()
    os._exit(status or (0 if is_written else _STATUS_OF_LOST_OUTPUT))


def _status(code: object) -> int:
    """The exit status after sys.exit(code)."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


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
    for one in objects_of(_FILES):  # without those that were frozen before the fork
        with contextlib.suppress(Exception):  # closed, or its disk is full
            one.flush()


def _is_output_written() -> bool:
    """Flush stdout and stderr. Returns whether both could be."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:  # of any kind: a script may set its own stream
            is_written = False
    return is_written
