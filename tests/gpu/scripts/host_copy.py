"""Copy a state from the GPU to the host as a checkpoint does: `python tests/gpu/scripts/host_copy.py MB RESULT.json`.

The result has the seconds of each copy, the same for torch's own, what is pinned, and whether all is equal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.runtime.checkpoint.host_copy import HostCopy

ROUNDS = 5


def main() -> None:
    """Measure, compare and write."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    state = _state(int(sys.argv[1]) * 10**6, device)
    copy = HostCopy(device)
    copy.reserve(state)
    ours_s = [_seconds(lambda: copy.of(state), device) for _ in range(ROUNDS)]
    pageable_s = [_seconds(lambda: [one.cpu() for one in state.values()], device) for _ in range(ROUNDS)]
    before = {name: tensor.clone() for name, tensor in state.items()}
    copied = copy.of(state)
    _wait(device)
    for tensor in state.values():
        tensor.zero_()  # a copy does not change with it
    result = {
        "bytes": sum(tensor.nbytes for tensor in before.values()),
        "memory_bytes": len(copy._whole._memory),
        "is_pinned": copy._whole._pinned and all(tensor.is_pinned() for tensor in copied.values()),
        "is_equal": all(_same(copied[name], tensor) for name, tensor in before.items()),
        "ours_s": ours_s,
        "pageable_s": pageable_s,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def _state(nbytes: int, device: torch.device) -> dict[str, Any]:
    """Tensors of several types, sizes and layouts."""
    columns = nbytes // 4 // 8192
    return {
        "float32": torch.randn(4096, columns, device=device),
        "transposed": torch.randn(2048, columns, device=device).t(),
        "bfloat16": torch.randn(4096, columns, device=device).to(torch.bfloat16),
        "int64": torch.arange(1001, device=device),
        "bool": torch.ones(3, dtype=torch.bool, device=device),
        "scalar": torch.tensor(0.1, dtype=torch.float64, device=device),
    }


def _same(copied: torch.Tensor, tensor: torch.Tensor) -> bool:
    return copied.device.type == "cpu" and copied.dtype == tensor.dtype and torch.equal(copied, tensor.cpu())


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start_s = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - start_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
