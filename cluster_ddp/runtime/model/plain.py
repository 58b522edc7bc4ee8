"""A model without what wraps it: DistributedDataParallel, torch.compile."""

from __future__ import annotations

from typing import TypeVar

from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def plain(part: T) -> T:
    """Return the module inside DistributedDataParallel and torch.compile, in whatever order; others unchanged.

    Its state has the plain names of the parameters, without "module." and "_orig_mod.".
    """
    inner = part
    while True:
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif "_orig_mod" in getattr(inner, "_modules", {}):  # torch.compile's OptimizedModule
            inner = inner._orig_mod  # type: ignore[attr-defined]
        else:
            return inner
