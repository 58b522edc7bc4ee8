"""Waiting for a GPU without blocking in it.

A call that waits for a device (`.item()`, `.cpu()`, `torch.cuda.synchronize`) returns when the device is done. A
collective whose peers never come is never done: the rank then waits in C++, where no signal handler of Python's runs
and no deadline holds. Here the end of the work is an event that is asked for again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# A log line's wait is as long as a few steps: what is added to it must be little, and so must be the CPU time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class DeviceTimeoutError(RuntimeError):
    """The device did not end its work in time: other ranks keep a collective waiting."""


class PeerFailedError(RuntimeError):
    """Another rank has failed: this one's collectives will never end."""


def for_device(device: torch.device, *, timeout_s: float, peer_failed: Callable[[], bool]) -> None:
    """Wait until a device has done all work of this thread's current stream; on a CPU nothing is waited for.

    Args:
        device: this rank's.
        timeout_s: seconds to wait at most.
        peer_failed: whether another rank has failed by now.

    Raises:
        DeviceTimeoutError: it was not done in time.
        PeerFailedError: another rank failed meanwhile.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _poll(event.query, timeout_s, peer_failed)


def is_broken(device: torch.device) -> bool:
    """Whether every call to a device fails, as after an assert in a kernel. A CPU is never broken."""
    if device.type == "cuda":
        try:
            torch.cuda.current_stream(device).query()
        except RuntimeError:
            return True
    return False


def _poll(is_done: Callable[[], bool], timeout_s: float, peer_failed: Callable[[], bool]) -> None:
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not is_done():
        if peer_failed():
            raise PeerFailedError("another rank failed while this one waited for its device")
        if time.monotonic() > deadline:
            raise DeviceTimeoutError(f"waited {timeout_s:g} s for the device")
        time.sleep(pause_s)  # lets handlers of signals and other threads run
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
