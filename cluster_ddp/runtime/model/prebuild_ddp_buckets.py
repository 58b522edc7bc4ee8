"""The layout of the buckets in which DDP adds up gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel


def prebuild_ddp_buckets(model: DistributedDataParallel, synchronize: Callable[[], object]) -> None:
    """Run one backward pass of zeros, after which DDP's buckets have their final order. A collective.

    From the second pass on, DDP sorts parameters into buckets by the order in which the first backward pass reached
    them. With more than two ranks, a gradient's place in its bucket decides the order in which the ranks' values are
    added. Does nothing for models with sparse gradients.

    DDP would sort them in the next forward pass, in which rank 0 broadcasts the order: a wait in C++, on GPUs without
    our time limit. So it sorts them now, when all ranks are known to be here.

    Args:
        model: just wrapped, before its first step. Its gradients are None afterwards.
        synchronize: waits for the device, with a time limit.

    Raises:
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    if any(getattr(part, "sparse", False) for part in model.modules()):
        return  # only embeddings make sparse gradients
    bare = model.module
    model.module = _Nothing(bare)
    try:
        with torch.enable_grad():
            # It needs an input: with device_ids, as on GPUs, DDP moves its first input to the device.
            model(torch.zeros(())).backward()
    finally:
        model.module = bare
    model.zero_grad(set_to_none=True)
    synchronize()  # the all-reduce ends when all ranks have come
    model._has_rebuilt_buckets = model.reducer._rebuild_buckets()  # as DDP's own forward does (torch 2.10 to 2.14)


class _Nothing(torch.nn.Module):
    """Returns a zero whose gradient reaches all parameters of another module, the last ones first."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """Return the zero."""
        parameters = [parameter for parameter in self.other.parameters() if parameter.requires_grad]
        touched = [parameter.flatten()[:1].sum().real.float() for parameter in parameters]
        return torch.stack([one.to(touched[0].device) for one in touched]).sum() * 0
