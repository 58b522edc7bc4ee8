"""Where a process is: the innermost line of the user's code, and what it does there. Imports no torch.

A stack is read from live frames, from an exception, or from what faulthandler wrote: of this rank in its file in the
run directory, also when it is stuck in C, and of its loaders' workers. A process has one handler of fatal signals from
faulthandler. Until there is a run directory it writes to stderr. It is left alone if the script had enabled its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from cluster_ddp.processes import catches, children
from cluster_ddp.run.files import is_at
from cluster_ddp.runtime.failure.stack_timer import StackTimer
from cluster_ddp.runtime.run_dir.fenced_writes import open_own

ANSWERED = "No step was completed."
"""Begins what a rank writes itself before its stacks."""
_HEAD_BYTES = 2048
_FLAGS = (
    os.O_WRONLY | os.O_CREAT | os.O_TRUNC,  # for the first line
    os.O_WRONLY | os.O_APPEND,
    os.O_WRONLY | os.O_APPEND | os.O_DSYNC,  # for a stuck rank: it can't `sync`, and an NFS client may write late
)
_WORKERS_S = 0.3  # how long workers may take to write their stacks
_SIGNAL = signal.SIGRTMAX - 3  # as that of stack_timer.py
_PACKAGE = str(Path(__file__).parents[2]) + "/"
_LIBRARIES = tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# Functions of DDP's that wait for a collective in C++, by the sources of torch 2.15.
_IN_CPP = {
    "_distributed_broadcast_coalesced": "broadcast",  # of buffers, such as BatchNorm's, in the forward pass
    "_sync_params_and_buffers": "broadcast",
    "_verify_param_shape_across_processes": "all_gather",
}
_ALL_REDUCING = ("runtime/checkpoint/stop_agreement.py", "runtime/data/uneven_inputs.py")
_THREAD = re.compile(r"^(Current thread|Thread|Stack) ")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    layer: str = ""
    """The layer of a sharded model whose parameters or gradients it exchanges; only of live frames."""


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    where: str
    """File and line of the user's code, such as "train.py:96"; "" if there is none."""
    doing: str
    """What it does there: a function, or "DataLoader"."""
    collective: str = ""
    """The collective that it waits in, such as "all_reduce"; "" if it is in none."""
    layer: str = ""
    """The layer of a sharded model that the collective is for, such as "layers.0"."""


def live() -> list[Frame]:
    """Return the main thread's stack, innermost frame first."""
    return _frames(traceback.walk_stack(sys._current_frames().get(threading.main_thread().ident or 0)))


def of_error(error: BaseException) -> list[Frame]:
    """Return where an exception was raised, innermost frame first; then who called where it was caught."""
    trace = error.__traceback__
    outer = trace.tb_frame.f_back if trace else None
    return _frames([*reversed([*traceback.walk_tb(trace)]), *(traceback.walk_stack(outer) if outer else ())])


def _frames(found: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    return [Frame(one.f_code.co_filename, line, one.f_code.co_name, _layer(one)) for one, line in found]


def _layer(frame: FrameType) -> str:
    """The layer that FSDP2 gathers or reduces in a frame, by the name that torch's profiler shows, too."""
    if not frame.f_code.co_filename.endswith("/_fsdp_param_group.py"):
        return ""
    name = getattr(frame.f_locals.get("self"), "_module_fqn", None)  # torch 2.10 to 2.14; private: may be gone
    return "" if name is None else str(name) or "the root"


def of_text(text: str) -> list[Frame]:
    """Return the main thread's stack of what faulthandler wrote: the last one of the last dump."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (match := _LINE.match(line)):
            stacks[-1].append(Frame(match[1], int(match[2]), match[3]))
    return next((stack for stack in reversed(stacks) if stack), [])


def is_users(file: str) -> bool:
    """Return whether a file is the user's code. The reference training counts as such."""
    if file.startswith(_PACKAGE):
        return file.startswith(f"{_PACKAGE}mnist/")
    is_library = "/site-packages/" in file or "/dist-packages/" in file
    return not (is_library or file.startswith(_LIBRARIES) or file.startswith("<"))


def place(stack: Sequence[Frame]) -> Place:
    """Return where a process with this stack is, innermost frame first."""
    at = next((number for number, frame in enumerate(stack) if is_users(frame.file)), None)
    inner = stack if at is None else stack[:at]
    where = "" if at is None else f"{Path(stack[at].file).name}:{stack[at].line}"
    collective = _collective(inner)
    layer = next((frame.layer for frame in inner if frame.layer), "") if collective else ""
    doing = stack[at or 0].function if stack else "no Python code"
    if any(frame.file.endswith("torch/utils/data/dataloader.py") for frame in stack):
        is_below = at is None or any(frame.file.endswith("/dataloader.py") for frame in inner)
        doing = "DataLoader" if is_below else f"DataLoader, in {doing}"
    elif any(frame.function == "backward" for frame in inner):
        doing = "backward"
    return Place(where, doing, collective, layer)


def _collective(inner: Iterable[Frame]) -> str:
    """The collective of these frames, which are not the user's."""
    for frame in inner:
        if frame.function in _IN_CPP and "/torch/" in frame.file:
            return _IN_CPP[frame.function]
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            if not frame.function.startswith("_") and frame.function != "wrapper":
                return re.sub("^(all_gather|reduce_scatter)_(single|into_tensor|tensor)$", r"\1", frame.function)
        elif frame.function == "collect" and frame.file.endswith(_ALL_REDUCING):
            return "all_reduce"
        elif frame.file.endswith("runtime/device/interruptible_wait.py"):
            return "a collective on the GPU"
    return ""


class StderrStacks:
    """Lets a rank that a fatal signal ends write its stacks to stderr, such as one that gloo aborts."""

    def __init__(self) -> None:
        self._is_ours = not faulthandler.is_enabled()
        if self._is_ours:
            faulthandler.enable(2)

    def close(self) -> None:
        """Leave faulthandler to others."""
        if self._is_ours:
            faulthandler.disable()
            self._is_ours = False


class StackFile:
    """The file of one rank: one line of JSON, of a fixed length, that is written again and again; then stacks.

    A former one is emptied. If it can't be made, it is an OSError. Faults come here, and no more to `of_stderr`.
    """

    def __init__(self, path: Path, of_stderr: StderrStacks | None = None) -> None:
        self.path, self.is_wanted = path, False
        self._head, self._end, self._stuck = (open_own(path, flags) for flags in _FLAGS)
        self._timer = StackTimer()
        self._own_bytes = float(_HEAD_BYTES)  # how much of it this rank has written when it was not stuck
        if of_stderr is not None:
            of_stderr.close()
        self._handles_faults = not faulthandler.is_enabled()
        if self._handles_faults:
            faulthandler.enable(self._end)

    def move(self, path: Path) -> None:
        """Write to another file from now on. The descriptors stay: faulthandler and other threads write to them."""
        for descriptor, flags in zip((self._head, self._end, self._stuck), _FLAGS):
            opened = open_own(path, flags)
            os.dup2(opened, descriptor, inheritable=False)
            os.close(opened)
        with contextlib.suppress(OSError):
            if not self.is_wanted:
                self.path.unlink()
        self.path = path

    def write(self, line: str) -> None:
        """Replace the first line."""
        os.pwrite(self._head, line.encode()[: _HEAD_BYTES - 1].ljust(_HEAD_BYTES - 1) + b"\n", 0)

    def dump(self) -> None:
        """Append the stacks of all threads."""
        self.is_wanted = True
        os.write(self._end, time.strftime(f"\n{ANSWERED} %Y-%m-%dT%H:%M:%S\n").encode())
        faulthandler.dump_traceback(self._end)
        self._own_bytes = os.fstat(self._end).st_size

    def sync(self) -> None:
        """Let other nodes see what was written, on a file system that writes late."""
        os.fsync(self._head)

    def take_stderr(self) -> None:
        """Append what C and C++ code writes to stderr from now on; what Python writes goes where it went."""
        stream: Any = sys.__stderr__
        if stream is None:
            return
        raw = getattr(stream.buffer, "raw", stream.buffer)  # without a buffer under PYTHONUNBUFFERED
        if raw.fileno() == 2:  # else it was done before
            stream.flush()
            raw.__init__(os.dup(2), "w", closefd=False)  # the same object: handlers of logging hold it
            os.dup2(self._end, 2)
            self._own_bytes = float("inf")

    def arm(self, timeout_s: float) -> None:
        """Append the main thread's stack in this time (inf: never), unless it is armed again. It needs no GIL.

        Who arms it is not stuck. So a stack that was written before, as after a suspension, is taken out again.
        """
        self._timer.set(timeout_s, self._stuck)
        if self._timer.has_fired and os.fstat(self._end).st_size > self._own_bytes:
            os.ftruncate(self._end, int(self._own_bytes))

    def close(self) -> None:
        """Stop writing, and remove the file unless there was a hang."""
        self._timer.close()
        if self._handles_faults:
            faulthandler.disable()
        with contextlib.suppress(OSError):
            if not self.is_wanted and is_at(self._head, self.path):  # else it is a newer start's
                self.path.unlink()
        for descriptor in (self._head, self._end, self._stuck):
            os.close(descriptor)


class WorkerStacks:
    """Asks processes forked from this one where they are. Make it before they are forked: they inherit the handler."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as there are workers
        self._is_ours = signal.getsignal(_SIGNAL) == signal.SIG_DFL
        if self._is_ours:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def places(self) -> tuple[str, ...]:
        """Return file and line of each child that can say it."""
        found = []
        for pid in children(os.getpid()) if self._is_ours else ():
            start = os.fstat(self._file.fileno()).st_size
            try:
                if not catches(pid, _SIGNAL):
                    continue  # the signal would end it
                os.kill(pid, _SIGNAL)
            except OSError:  # it has just ended
                continue
            deadline = time.monotonic() + _WORKERS_S
            while os.fstat(self._file.fileno()).st_size == start and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.02)  # the rest of its stack
            text = os.pread(self._file.fileno(), 1 << 16, start).decode(errors="replace")
            at = place(of_text(text))
            if at.where:
                found.append(f"{at.doing.partition(', in ')[2] or at.doing} ({at.where})")
        return tuple(found)

    def close(self) -> None:
        """Remove the handler, and ask nobody from now on."""
        if self._is_ours:
            # The children have the handler still, and the file.
            faulthandler.unregister(_SIGNAL)
            self._is_ours = False
        self._file.close()
