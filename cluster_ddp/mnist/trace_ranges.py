"""Names for the parts of a step in a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import profiler

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a context whose body has a name in a profile."""

_NOTHING = contextlib.nullcontext()


def ranges(device: torch.device, *, enabled: bool) -> Ranges:
    """What names a part of a step: in torch's profiles and, on GPUs, for Nsight Systems (NVTX).

    Args:
        device: of this rank.
        enabled: False names nothing.
    """
    if not enabled:
        return lambda name: _NOTHING
    return _with_nvtx if device.type == "cuda" else profiler.record_function


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiler.record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()
