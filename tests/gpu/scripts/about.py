"""What a rank computes on, and with which versions."""

from __future__ import annotations

import platform
from typing import Any

import torch


def about(device: torch.device) -> dict[str, Any]:
    """As the figures' file tells it."""
    if device.type != "cuda":
        return {"device": "CPU", "versions": f"Python {platform.python_version()}, torch {torch.__version__}"}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    return {
        "device": torch.cuda.get_device_name(device),
        "versions": f"Python {platform.python_version()}, {versions}",
    }
