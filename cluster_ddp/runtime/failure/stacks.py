"""Where a process is: the innermost line of the user's code, and what it does there. Imports no torch.

A stack is read from live frames, from an exception, or from what faulthandler wrote.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ANSWERED = "No step was completed."
"""Begins what a rank writes itself before its stacks."""
_PACKAGE = str(Path(__file__).parents[2]) + "/"
_LIBRARIES = tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# Functions of DDP's that wait for a collective in C++, by the sources of torch 2.15.
_IN_CPP = {
    "_distributed_broadcast_coalesced": "broadcast",  # of buffers, such as BatchNorm's, in the forward pass
    "_sync_params_and_buffers": "broadcast",
    "_verify_param_shape_across_processes": "all_gather",
}
_THREAD = re.compile(r"^(Current thread|Thread|Stack) ")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    where: str
    """File and line of the user's code, such as "loop.py:96"; "" if there is none."""
    doing: str
    """What it does there: a function, or "DataLoader"."""
    collective: str = ""
    """The collective that it waits in, such as "all_reduce"; "" if it is in none."""


def live() -> list[Frame]:
    """Return the main thread's stack, innermost frame first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]


def of_error(error: BaseException) -> list[Frame]:
    """Return where an exception was raised, innermost frame first; then who called where it was caught."""
    trace = error.__traceback__
    outer = trace.tb_frame.f_back if trace else None
    frames = [*reversed([*traceback.walk_tb(trace)]), *(traceback.walk_stack(outer) if outer else ())]
    return [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]


def of_text(text: str) -> list[Frame]:
    """Return the main thread's stack of what faulthandler wrote: the last one of the last dump."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (match := _LINE.match(line)):
            stacks[-1].append(Frame(match[1], int(match[2]), match[3]))
    return next((stack for stack in reversed(stacks) if stack), [])


def is_users(frame: Frame) -> bool:
    """Return whether a frame is of the user's code. The reference training counts as such."""
    if frame.file.startswith(_PACKAGE):
        return frame.file.startswith(f"{_PACKAGE}mnist/")
    is_library = "/site-packages/" in frame.file or "/dist-packages/" in frame.file
    return not (is_library or frame.file.startswith(_LIBRARIES) or frame.file.startswith("<"))


def place(stack: Sequence[Frame]) -> Place:
    """Return where a process with this stack is.

    Args:
        stack: innermost frame first.
    """
    at = next((number for number, frame in enumerate(stack) if is_users(frame)), None)
    inner = stack if at is None else stack[:at]
    where = "" if at is None else f"{Path(stack[at].file).name}:{stack[at].line}"
    collective = _collective(inner)
    if any(frame.file.endswith("torch/utils/data/dataloader.py") for frame in stack):
        doing = "DataLoader"
        if at is not None and not any(frame.file.endswith("/dataloader.py") for frame in inner):
            doing = f"DataLoader, in {stack[at].function}"
    elif any(frame.function == "backward" for frame in inner):
        doing = "backward"
    else:
        doing = stack[at].function if at is not None else (stack[0].function if stack else "no Python code")
    return Place(where, doing, collective)


def _collective(inner: Iterable[Frame]) -> str:
    """The collective of these frames, which are not the user's."""
    for frame in inner:
        if frame.function in _IN_CPP and "/torch/" in frame.file:
            return _IN_CPP[frame.function]
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            if not frame.function.startswith("_") and frame.function != "wrapper":
                return frame.function
        elif frame.file.endswith("runtime/checkpoint/stop_agreement.py"):
            return "all_reduce"
        elif frame.file.endswith("runtime/device/nonblocking_wait.py"):
            return "a collective on the GPU"
    return ""
