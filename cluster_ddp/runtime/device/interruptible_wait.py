"""Waiting for a GPU without blocking, and whether it has unfinished work.

A call that waits for a device (`.item()`, `.cpu()`, `torch.cuda.synchronize`) returns when the device is done. A
collective whose peers never come does not end: the rank then waits in C++, where no Python signal handler runs and no
deadline applies. Here an event marks the end of the work and is polled.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cluster_ddp import processes

# A log line waits for a few steps. The pauses must add little to that, and polling must need little CPU time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

watched: list[torch.cuda.Stream] = []
"""Streams that `is_busy` looks at, too; see `World.watch_stream`."""


class DeviceTimeoutError(RuntimeError):
    """The device did not finish its work in time: other ranks keep a collective waiting."""


class PeerFailedError(RuntimeError):
    """Another rank has failed: this one's collectives will never end."""


def for_device(device: torch.device, *, timeout_s: float, peer_failed: Callable[[], bool]) -> None:
    """Wait until a GPU has finished all work of this thread's current stream. For a CPU return at once.

    Raises:
        DeviceTimeoutError: it was not done within `timeout_s` seconds.
        PeerFailedError: another rank failed meanwhile.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _poll(event.query, timeout_s, peer_failed)


def _poll(is_done: Callable[[], bool], timeout_s: float, peer_failed: Callable[[], bool]) -> None:
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    suspensions = processes.Suspensions()
    while not is_done():
        if peer_failed():
            raise PeerFailedError("another rank failed while this one waited for its device")
        deadline += suspensions.missed_s()
        if time.monotonic() > deadline:
            raise DeviceTimeoutError(f"waited {timeout_s:g} s for the device")
        time.sleep(pause_s)  # lets handlers of signals and other threads run
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def is_broken(device: torch.device) -> bool:
    """Return whether every call to a device fails, as after an assert in a kernel. Always False for a CPU."""
    if device.type == "cuda":
        try:
            torch.cuda.current_stream(device).query()
        except RuntimeError:
            return True
    return False


def is_busy(device: torch.device) -> bool:
    """Return whether a device has unfinished work on its default stream or a watched one. Callable from any thread."""
    try:
        return not all(stream.query() for stream in (torch.cuda.default_stream(device), *watched))
    except RuntimeError:  # after an error of the device every call fails
        return True
