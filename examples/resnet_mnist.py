"""Train torchvision's ResNet-18 on torchvision's MNIST, with checkpoints.

python scripts/download_data.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/resnet_mnist.py data
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from torchvision.transforms import Compose, Grayscale, Normalize, ToTensor

import cluster_ddp


def main(data_dir: str = "data") -> None:
    """Train for two epochs, then test."""
    transform = Compose([Grayscale(3), ToTensor(), Normalize(0.1307, 0.3081)])
    with cluster_ddp.distributed() as world:
        if not Path(data_dir, "MNIST", "raw").is_dir():  # one rank prints it
            hint = "on a login node: python scripts/download_data.py; or give its folder: resnet_mnist.py FOLDER"
            raise cluster_ddp.DataError(f"Reading MNIST from {data_dir}/:", "it is not there.", hint)
        shard = world.shard(MNIST(data_dir, transform=transform), batch_size=64, shuffle_seed=1)
        test_shard = world.shard(MNIST(data_dir, train=False, transform=transform), batch_size=64)
        model = world.wrap(resnet18(num_classes=10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
        for epoch in checkpoint.epochs(2):
            for images, labels in shard:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                if shard.step % 100 == 0:
                    world.print(f"epoch {epoch + 1}, step {shard.step}/{len(shard)}: loss {loss.item():.4f}")
                checkpoint.step()

        model.eval()
        correct = seen = 0
        with torch.no_grad():
            for images, labels in test_shard:
                correct += int((model.module(images).argmax(1) == labels).sum())
                seen += len(labels)
        world.print(f"accuracy {world.mean(correct, seen):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
