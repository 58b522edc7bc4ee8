"""The layout in which DDP adds up gradients."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def prebuild_ddp_buckets(model: DistributedDataParallel) -> None:
    """One backward pass of nothing, after which DDP has its buckets in the order that they keep.

    DDP sorts parameters into buckets by the order in which the first backward pass reached them, from the second pass
    on. On more than two ranks a gradient's place in its bucket decides in which order the ranks' values are added.
    """
    if any(getattr(part, "sparse", False) for part in model.modules()):
        return  # sparse gradients come from an embedding only
    bare = model.module
    model.module = _Nothing(bare)
    try:
        with torch.enable_grad():
            # An input, since with device_ids, as on GPUs, DDP moves the first of its inputs to the device.
            model(torch.zeros(())).backward()
    finally:
        model.module = bare
    model.zero_grad(set_to_none=True)


class _Nothing(torch.nn.Module):
    """Zero, whose gradient reaches all parameters of another module, the last ones first."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """The zero."""
        parameters = [parameter for parameter in self.other.parameters() if parameter.requires_grad]
        return torch.stack([parameter.flatten()[:1].sum().real.float() for parameter in parameters]).sum() * 0
