"""Lets the main thread write its stack after a time, also while a thread holds Python's lock: the kernel signals it.

faulthandler's own timer (dump_traceback_later) is not used. Its thread reads the frames of all others. If they run
then, as after a suspension, it may end the process by SIGSEGV (cpython#131580). In a signal handler, they are at rest.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import time

from cluster_ddp.runtime.console import complain

HEAD = "Stack (most recent call first):"
"""Begins what the main thread writes (traceback.c of CPython 3.10 to 3.14)."""
_SIGNAL = signal.SIGRTMAX - 4  # real-time signals have no other meaning; the last few are seldom used


class StackTimer:
    """A timer of the kernel's (timer_create(2)). The last one that was set says to which file the stack goes.

    It says so once if it can't work: the script handles the signal itself, or a resource limit forbids timers.
    """

    def __init__(self) -> None:
        self._id, self._is_set = ctypes.c_void_p(), False
        self.has_fired = False
        """Whether it has asked the main thread, before it was set again."""
        try:
            self._output = _output()
            event = _Event(signal=_SIGNAL)
            _call("timer_create", time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id))
        except OSError as error:
            self._output = -1
            complain(f"warning: a rank that is stuck in C code counts as one that does not answer: no timer: {error}")

    def set(self, timeout_s: float, descriptor: int) -> None:
        """Let it ask in this time, more than 0 s; never if that is inf. What was set before is void."""
        if self._output < 0:
            return
        os.dup2(descriptor, self._output, inheritable=False)
        is_set = timeout_s < float("inf")
        after_s = timeout_s if is_set else 0.0
        left, wanted = _Interval(), _Interval(seconds=int(after_s), nanoseconds=int(after_s % 1 * 1e9))
        _call("timer_settime", self._id, 0, ctypes.byref(wanted), ctypes.byref(left))
        self.has_fired |= self._is_set and not (left.seconds or left.nanoseconds)
        self._is_set = is_set

    def close(self) -> None:
        """Ask no more. The handler stays, for a signal that comes late, and writes nowhere."""
        if self._output < 0:
            return
        _call("timer_delete", self._id)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._output, inheritable=False)
        os.close(nowhere)
        self._output = -1


class _Event(ctypes.Structure):
    """sigevent(3type); by default, the process gets the signal: the main thread, unless it blocks it."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_int * 12),
    )


class _Interval(ctypes.Structure):
    """itimerspec(3type)."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


@functools.cache
def _output() -> int:
    """Handle the signal from now on. Returns the descriptor to which stacks are written: it stays open."""
    if signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        raise OSError(f"the script handles signal {_SIGNAL:d}")
    descriptor = os.open(os.devnull, os.O_WRONLY)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=False)
    return descriptor


def _call(function: str, *words: object) -> None:
    library = ctypes.CDLL("librt.so.1", use_errno=True)  # glibc has its functions in libc since 2.34
    if getattr(library, function)(*words):
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
