"""What a rank computes on, and with which versions. As a script, what torch sees here, in a line of JSON."""

from __future__ import annotations

import ctypes
import json
import platform
from typing import Any

import torch


def about(device: torch.device) -> dict[str, Any]:
    """As the figures' file tells it."""
    if device.type != "cuda":
        return {"device": "CPU", "versions": f"Python {platform.python_version()}, torch {torch.__version__}"}
    nccl = ".".join(map(str, nccl_version()))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    return {
        "device": torch.cuda.get_device_name(device),
        "versions": f"Python {platform.python_version()}, {versions}",
    }


def nccl_version() -> tuple[int, int, int]:
    """Of the NCCL that is loaded. torch's own function tells the one that torch was built with."""
    packed = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(packed))
    return packed.value // 10000, packed.value // 100 % 100, packed.value % 100


def main() -> None:
    """Print what torch sees, and why not if it fails."""
    seen: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip}
    try:
        import numpy  # noqa: F401  # the package needs it

        seen["available"] = torch.cuda.is_available()
        seen["gpus"] = torch.cuda.device_count()
        seen["names"] = [torch.cuda.get_device_name(i) for i in range(seen["gpus"])]
        seen["nccl"] = nccl_version() if seen["gpus"] else ()
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    print("about", json.dumps(seen))


if __name__ == "__main__":
    main()
