"""Ending this process at once, where Python's own way out would wait for ever.

Destructors of CUDA and NCCL wait for kernels, and kernels for ranks that are gone.
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
    """Call this first: it keeps what must not be lost, such as a checkpoint that is being written.

    Args:
        method: a bound one, forgotten when its object is gone. It must not need the GPU.
    """
    assert isinstance(method, MethodType)
    _before.append(weakref.WeakMethod(method))


def now(status: int) -> NoReturn:
    """End the process with an exit status; may be called from any thread."""
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
