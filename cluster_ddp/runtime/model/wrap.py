"""A model in DistributedDataParallel, with defaults for training that resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import check_options
from cluster_ddp.runtime.model.prebuild_ddp_buckets import prebuild_ddp_buckets

_NEVER = 2**31 - 1
_HINT = "leave it out; for a model on several devices: world.wrap(model, place=False)"
_CHOSEN = dict.fromkeys(("module", "device_ids", "output_device"), ("world.wrap chooses it.", _HINT))


def wrap(
    model: torch.nn.Module,
    device: torch.device,
    *,
    place: bool,
    options: Mapping[str, Any],
    synchronize: Callable[[], object],
) -> DistributedDataParallel:
    """Wrap a model as `World.wrap` describes.

    Args:
        model: the model.
        device: this rank's device.
        place: move the model to the device.
        options: for DistributedDataParallel; they replace the defaults.
        synchronize: waits for the device, with a time limit.

    Raises:
        SpecError: DistributedDataParallel has no such option.
        DeviceTimeoutError, PeerFailedError: as `World.synchronize`.
    """
    check_options(options, "world.wrap(model, {}=…)", DistributedDataParallel, chosen=_CHOSEN)
    device_ids = [device.index] if place and device.type == "cuda" else None
    model = model.to(device) if place else model
    wrapped = DistributedDataParallel(model, device_ids=device_ids, **{"gradient_as_bucket_view": True, **options})
    if device.type == "cuda":
        # In every hundredth step DDP would measure times: it waits for the device then, and no graph can capture that.
        wrapped._set_ddp_runtime_logging_sample_rate(_NEVER)
    if not wrapped.static_graph:  # its first backward pass must be a real one: it notes which parameters are used
        prebuild_ddp_buckets(wrapped, synchronize)
    return wrapped


def sync_batchnorm(model: torch.nn.Module, device: torch.device) -> tuple[torch.nn.Module, str]:
    """Convert the BatchNorm layers of a model to SyncBatchNorm, which torch has for GPUs only.

    Returns:
        The model, and what to tell the user; empty if there is nothing to tell.
    """
    if device.type == "cpu":
        return model, "SyncBatchNorm needs GPUs: on CPUs each rank's BatchNorm uses its own batch."
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), ""
