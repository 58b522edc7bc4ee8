"""What is in a batch: its number of samples, and a digest that tells items apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first array, else of its first list."""
    if getattr(batch, "ndim", 0):
        return len(batch)
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    arrays = [part for part in parts if getattr(part, "ndim", 0)]
    if arrays:
        return len(arrays[0])
    nested = [part for part in parts if isinstance(part, (list, tuple, Mapping))]
    return samples_in(nested[0]) if nested else max(1, len(parts))


def digest(item: Any) -> int:
    """Return what tells items apart, above 0; the same in other processes, of arrays, bytes and plain values."""
    content = hashlib.sha256()
    parts = [item]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
        elif isinstance(part, torch.Tensor):
            content.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, (str, bytes, int, float)):
            content.update(repr(part).encode())
        else:  # NumPy's arrays and PIL's images have the method
            content.update(part.tobytes() if hasattr(part, "tobytes") else type(part).__name__.encode())
    return int.from_bytes(content.digest()[:7], "big") + 1
