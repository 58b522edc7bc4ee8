"""DDP over a model on two devices: each rank drives two GPUs. Without GPUs, the CPU stands in for both.

cluster-ddp submit --nodes 2 --gpus-per-node 4 --gpus-per-task 2 -- python examples/two_device_model.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import cluster_ddp
from cluster_ddp.mnist import data as mnist_data


class TwoDeviceModel(nn.Module):
    """The first layers on one device, the last ones on the other. The world has the devices: none is written here."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()).to(first)
        self.head = nn.Linear(8 * 12 * 12, 10).to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10), on the second device, of images (N, 1, 28, 28)."""
        logits: torch.Tensor = self.head(self.encoder(images.to(self.first)).to(self.second))
        return logits


def main() -> None:
    """Train for two epochs."""
    with cluster_ddp.distributed() as world:
        # As one process without the variable, both are the same device.
        first, second = world.devices[0], world.devices[-1]
        torch.manual_seed(0)
        model = world.wrap(TwoDeviceModel(first, second), place=False)  # DDP adds up gradients on each device
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        # 1,437 and 360 small images, (N, 1, 28, 28), which come with cluster_ddp.
        train_set, test_set = mnist_data.load("digits", Path())
        shard = world.shard(train_set, batch_size=16, shuffle_seed=1)
        test_shard = world.shard(test_set, batch_size=64)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
        for epoch in checkpoint.epochs(2):
            for images, labels in shard:
                loss = F.cross_entropy(model(images), labels.to(second))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpoint.step()
            with torch.no_grad():
                hits = [(model(images).argmax(1).to(first) == labels).sum().item() for images, labels in test_shard]
            accuracy = world.mean(sum(hits), sum(len(labels) for _, labels in test_shard))
            world.print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}, on {' and '.join(map(str, world.devices))}")


if __name__ == "__main__":
    main()
