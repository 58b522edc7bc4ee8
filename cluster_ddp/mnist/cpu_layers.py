"""What makes a model train faster on CPUs, with the measured reason beside each.

Shares of time are of a step of the MNIST CNN, on one thread of an x86-64 CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

Model = TypeVar("Model", bound=nn.Module)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; mallopt(3)
_ONE_GIB, _NEVER = 1 << 30, (1 << 31) - 1


def fast_cpu(model: Model) -> Model:
    """Make a model train faster on CPUs, before `world.wrap`. Its parameters and their names stay.

    - nn.Dropout, if its probability is a multiple of 1/256, draws a random byte for each value instead of a double: a
      fifth of the time of a step. It draws other random numbers.
    - nn.MaxPool2d works in channels_last, with the same bits: a contiguous input takes up to sixteen times as long.
      Images in channels_last help the convolutions, too: `images.to(memory_format=torch.channels_last)`.
    - malloc keeps freed memory, which the next step needs again (mallopt(3), glibc only): a fifth of the time of a
      step, in 5,000 page faults. The process keeps the memory of its largest step. If the environment has settings for
      malloc, they stay.

    On a GPU the layers do what torch's own do.

    Args:
        model: its layers are replaced in place.

    Returns:
        The same model.
    """
    keep_freed_memory(os.environ)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Dropout and (256 * layer.p).is_integer() and layer.p < 1:
                setattr(parent, name, ByteDropout(layer.p).train(layer.training))
            elif type(layer) is nn.MaxPool2d and not layer.return_indices:
                setattr(parent, name, ChannelsLastMaxPool2d(layer).train(layer.training))
    return model


class ByteDropout(nn.Module):
    """Dropout (Srivastava et al. 2014) that on the CPU draws one random byte for each value.

    Args:
        p: probability of zero, below 1, a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values, in training mode only. The result has the shape and dtype of `x`."""
        if not self.training or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()] >= int(256 * self.p)
        return x * kept.view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))


class ChannelsLastMaxPool2d(nn.Module):
    """Max-pooling whose forward and backward pass on the CPU use channels_last, whatever the layout of the input.

    Args:
        layer: the plain one.
    """

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The maxima: (N, C, H, W) -> (N, C, smaller H, smaller W), of the same dtype."""
        if x.device.type != "cpu" or x.dim() != 4:
            return self.pool(x)  # type: ignore[no-any-return]
        maxima: torch.Tensor = self.pool(x.contiguous(memory_format=torch.channels_last))
        if maxima.requires_grad:
            maxima.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return maxima


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Let malloc keep freed memory, unless the environment (only read) has settings for malloc."""
    if any(name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in env[name]) for name in env):
        return
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _ONE_GIB)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
