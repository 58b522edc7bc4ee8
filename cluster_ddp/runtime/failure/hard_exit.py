"""End this process at once, if Python's normal exit would wait forever.

Destructors of CUDA and NCCL wait for kernels, and kernels wait for ranks that are gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import NoReturn

_PATIENCE_S = 60.0  # a file system that hangs must not keep the process

_before: list[weakref.WeakMethod[Callable[[], object]]] = []


def before(method: Callable[[], object]) -> None:
    """Let `now` call a bound method first, which saves what must not be lost, unless its object is gone by then.

    It must not need the GPU.
    """
    assert isinstance(method, MethodType)
    _before.append(weakref.WeakMethod(method))


def now(status: int) -> NoReturn:
    """End the process with an exit status, after the methods of `before` (at most 60 s). Callable from any thread."""
    keeping = threading.Thread(target=_keep, daemon=True)
    keeping.start()
    keeping.join(_PATIENCE_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _keep() -> None:
    for reference in _before:
        if (method := reference()) is not None:
            with contextlib.suppress(Exception):
                method()
