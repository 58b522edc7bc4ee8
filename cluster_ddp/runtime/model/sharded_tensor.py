"""Tensors that are sharded over the ranks (DTensor), as FSDP2 makes of parameters; of others, the same without effect.

Imports neither DTensor nor FSDP2: that takes 0.8 s, which a training under DDP does not need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; of others the tensor itself."""
    sharded: Any = tensor
    part: torch.Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole, and detached: a shard is gathered from all ranks, which is a collective."""
    sharded: Any = tensor.detach()
    whole: torch.Tensor = sharded.full_tensor() if is_sharded(tensor) else sharded
    return whole


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients as `World.clip_grad_norm` describes; the norm is on the device, and maybe not computed yet."""
    given = [one for one in parameters if one.grad is not None]
    return full(torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type))


def digest(model: torch.nn.Module, synchronize: Callable[[], object]) -> str:
    """Return the SHA-256 of a model's parameters and buffers, gathering one at a time. A collective for shards."""
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = full(tensor)
        synchronize()  # reading it would block until it is gathered
        content.update(whole.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
