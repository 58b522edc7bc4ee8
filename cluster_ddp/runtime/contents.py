"""What a value has that may change, in a form that can be compared and kept: no object of the training."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cluster_ddp.runtime import rng
from cluster_ddp.runtime.model.dtensor_pieces import content, is_sharded

PLAIN = bool, int, float, str, type(None)
_LARGEST_BYTES = 1 << 20
_MOST_ITEMS = 5000  # with those in containers inside
_CONTAINERS = (dict, list, tuple, deque, set)


def plain_tensor(value: torch.Tensor) -> object:
    """Return what a small tensor has that does not train, to be compared; None of another."""
    is_plain = value.layout == torch.strided and not (value.is_meta or value.requires_grad or is_sharded(value))
    if not is_plain or value.nbytes > _LARGEST_BYTES:
        return None
    return value.dtype, value.shape, content(value).tobytes()


def content_of(value: Any, tensor: Callable[[torch.Tensor], object] = plain_tensor) -> object:
    """Return what a value has, to be compared; None of one that is no plain value, array, generator or container.

    `tensor` says what a tensor has.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, rng.GENERATORS):
        return content_of(rng.state_of(value))
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, bytearray | array):
        return bytes(memoryview(value).cast("B")) if len(value) <= _LARGEST_BYTES else None
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes()) if value.nbytes <= _LARGEST_BYTES else None
    if isinstance(value, SimpleNamespace | Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return content_of(getattr(value, "__dict__", {}), tensor)
    if not isinstance(value, _CONTAINERS) or _is_large(value):
        return None
    if isinstance(value, dict):
        return [(repr(key), content_of(one, tensor)) for key, one in value.items()]
    return sorted(map(repr, value)) if isinstance(value, set) else [content_of(one, tensor) for one in value]


def _is_large(value: Any) -> bool:
    left, count = [value], 0
    while left and count <= _MOST_ITEMS:
        one = left.pop()
        count += len(one)
        if count <= _MOST_ITEMS:
            left += [
                inner for inner in (one.values() if isinstance(one, dict) else one) if isinstance(inner, _CONTAINERS)
            ]
    return count > _MOST_ITEMS
