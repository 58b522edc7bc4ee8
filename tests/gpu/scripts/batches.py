"""The same data kept on the GPU and through a loader: `python tests/gpu/scripts/batches.py RESULT.json`.

The result has the greatest differences over two epochs, of plain tensors and of the normalised digits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset, TensorDataset

import cluster_ddp
from cluster_ddp.mnist import data


def main() -> None:
    """Compare and write."""
    digits, _ = data.load("digits", Path())
    with cluster_ddp.distributed() as world:
        result = {
            "on_device": world.device.type,
            "plain": _difference(world, TensorDataset(torch.randn(1000, 7), torch.arange(1000))),
            "normalised": _difference(world, digits),
        }
    Path(sys.argv[1]).write_text(json.dumps(result))


def _difference(world: cluster_ddp.World, dataset: Dataset[tuple[torch.Tensor, ...]]) -> list[float]:
    """Of the samples, then of the labels."""
    resident = world.shard(dataset, batch_size=64, shuffle_seed=1)
    loaded = world.shard(dataset, batch_size=64, shuffle_seed=1, num_workers=2)
    greatest = [0.0, 0.0]
    for epoch in range(2):
        resident.set_epoch(epoch)
        loaded.set_epoch(epoch)
        for ours, theirs in zip(resident, loaded, strict=True):
            assert all(part.device.type == world.device.type for part in (*ours, *theirs))
            found = [float((one.cpu().double() - other.cpu().double()).abs().max()) for one, other in zip(ours, theirs)]
            greatest = list(map(max, greatest, found))
    return greatest


if __name__ == "__main__":
    main()
