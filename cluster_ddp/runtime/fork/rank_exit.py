"""The end of a rank that was forked: as Python's own, without its last walk through all that the ranks share.

That walk writes to every object, so the kernel copies all that was imported once for every rank: 64 ranks on two cores
were done after 12 s and gone after 143 s.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NoReturn

_STATUS_OF_LOST_OUTPUT = 120  # as Python's (sys.exit)


def after(run: Callable[[], None], shared: Mapping[str, ModuleType]) -> NoReturn:
    """Run something, then end the process: threads, exit handlers, what its own modules hold, output.

    Args:
        run: what the process is for. Its SystemExit tells the status.
        shared: the modules that were imported before the fork; they stay as they are.
    """
    status = 0
    try:
        run()
    except SystemExit as error:
        status = _status(error.code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are not daemons
    atexit._run_exitfuncs()
    threading.excepthook = lambda arguments: None  # of daemons, whose modules are emptied now
    _drop([name for name, module in sys.modules.items() if module is not shared.get(name)])
    is_written = [_is_written(stream) for stream in (sys.stdout, sys.stderr)]
    if not all(is_written):
        status = status or _STATUS_OF_LOST_OUTPUT
    os._exit(status)


def _drop(names: Sequence[str]) -> None:
    """Let go of modules and what they hold, so that open files are written and destructors run."""
    modules = [weakref.ref(sys.modules.pop(name)) for name in reversed(names)]
    gc.collect()
    for module in modules:
        if (left := module()) is not None:  # somebody else refers to it
            vars(left).clear()
    gc.collect()


def _status(code: object) -> int:
    """What the process ends with after sys.exit(code)."""
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
