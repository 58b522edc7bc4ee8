"""Save on rank 0, load on all ranks: the part of a checkpoint that every text shows, and what it leaves out.

torchrun --nproc-per-node 2 examples/checkpoint_by_hand.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/checkpoint_by_hand.py

`cluster_ddp.Checkpointer` does this, and what is missing here: optimizer, place in the epoch and random numbers of
every rank; files that are whole or absent, with a digest; saving in the background; stopping in time. See mnist_ddp.py.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import cluster_ddp


def network() -> nn.Module:
    """A small one, for images (N, 1, 28, 28) of ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))


def main() -> None:
    """Train a little, save, load into another model, and compare."""
    path = Path(os.environ.get("CLUSTER_DDP_RUN_DIR", "."), "by_hand.pt")  # a folder that all nodes see
    with cluster_ddp.distributed() as world:
        torch.manual_seed(0)
        model = world.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        dataset = data.TensorDataset(torch.randn(1024, 1, 28, 28), torch.randint(10, (1024,)))
        for images, labels in world.shard(dataset, batch_size=64, shuffle_seed=1):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        # The weights are the same on all ranks, so one writes. The names have no "module." in front.
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.module.state_dict(), path)
        # No rank may read before rank 0 has written.
        world.barrier()
        # Without map_location each tensor would go to the GPU that it was saved from: all to rank 0's.
        state = torch.load(path, map_location=world.device, weights_only=True)
        other = world.wrap(network())
        other.module.load_state_dict(state)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert world.gather(same) == [True] * world.world_size
        # No rank may remove the file before all have read it.
        world.barrier()
        if world.is_main:
            path.unlink()
        world.print(f"{world.world_size} ranks have the same weights as before.")


if __name__ == "__main__":
    main()
