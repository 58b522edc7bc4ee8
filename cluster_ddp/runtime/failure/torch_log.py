"""What torch's C++ code logs besides the errors that it raises."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_ENV = "TORCH_CPP_LOG_LEVEL"
_ERROR = 2  # c10/util/logging_is_not_google_glog.h


def leave_out_warnings() -> None:
    """Log only errors from now on, unless the user has chosen a level.

    A question to a store that is gone raises an error. It is logged as a warning as well, with twenty C++ frames
    (TCPStore.cpp, torch 2.10 to 2.14): a rank that hangs would print them after the verdict that names it. The variable
    is read when torch is imported, which scripts have done before, so the level is set where it is kept.
    """
    if os.environ.get(_ENV):
        return
    import torch

    with contextlib.suppress(OSError, ValueError):  # a build of torch with glog
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, _ERROR)
