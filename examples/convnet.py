"""A ConvNet with batch normalisation on MNIST. Its ranks come from Slurm, from torchrun, or are started by hand.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/convnet.py
torchrun --nproc-per-node 4 examples/convnet.py
python examples/convnet.py --world-size 4 --rank 0          by hand, each in a terminal of its own: 0, 1, 2, 3
python examples/convnet.py --world-size 2 --rank 1 --master-addr node1        on two hosts: rank 0 runs on node1

The text that it is from has a learning rate of 1e-4 for each rank: --lr 1e-4 learns little in two epochs.
"""

import argparse
import os
import shlex
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data
from torchvision import datasets, transforms

import cluster_ddp
from cluster_ddp.mnist import data as mnist_data


class ConvNet(nn.Module):
    """Two layers of convolution, batch normalisation, ReLU and pooling, then a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.layer(1, 16), self.layer(16, 32))
        self.linear = nn.Linear(7 * 7 * 32, 10)

    @staticmethod
    def layer(inputs: int, outputs: int) -> nn.Module:
        """5x5 convolution that keeps the size, then pooling that halves it."""
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28)."""
        logits: torch.Tensor = self.linear(self.layers(images).flatten(1))
        return logits


def mnist(folder: str) -> Path:
    """A folder that was named, if it has MNIST."""
    if not Path(folder, "MNIST").exists():
        fetch = f"python scripts/download_data.py --data-dir {shlex.quote(folder)}"
        raise argparse.ArgumentTypeError(f"there is no MNIST in {folder}. Hint: on a login node: {fetch}")
    return Path(folder)


def load(folder: Path | None) -> datasets.MNIST | data.TensorDataset:
    """MNIST in a folder to train on; without one, the 1,437 small digits that come with cluster_ddp."""
    if folder is not None:
        return datasets.MNIST(folder, transform=transforms.ToTensor())
    digits, _ = mnist_data.load("digits", Path())
    return data.TensorDataset(*digits.batch(torch.arange(len(digits))))


def by_hand(options: argparse.Namespace) -> None:
    """Say which rank this is. Launchers set these variables."""
    gpus = torch.cuda.device_count()
    os.environ |= {
        "RANK": str(options.rank),
        "LOCAL_RANK": str(options.rank % gpus if gpus else options.rank),
        "WORLD_SIZE": str(options.world_size),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }


def train(options: argparse.Namespace) -> None:
    """Train, and print loss and accuracy of all ranks every `log_interval` steps."""
    with cluster_ddp.distributed() as world:
        world.print("Data:", options.data_dir or "the 1,437 digits of cluster_ddp, not MNIST")
        torch.manual_seed(0)  # before the model: the same weights on all ranks
        model = world.wrap(ConvNet(), sync_batchnorm=True)
        # A global batch of world_size times as many samples: as much more learning rate.
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * world.world_size)
        shard = world.shard(load(options.data_dir), batch_size=options.batch_size, shuffle_seed=0)
        loss_meter, hit_meter = cluster_ddp.Meter(world), cluster_ddp.Meter(world)
        meters = {"loss": loss_meter, "hits": hit_meter}
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, meters=meters)
        start_s = time.perf_counter()
        for epoch in checkpoint.epochs(options.epochs):
            for images, labels in shard:
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_meter.add(loss * len(labels), len(labels))
                hit_meter.add((logits.argmax(1) == labels).sum(), len(labels))
                if (shard.step + 1) % options.log_interval == 0:
                    place = f"epoch {epoch + 1}, step {shard.step + 1}/{len(shard)}"
                    world.print(f"{place}: loss {loss_meter.mean():.4f}, accuracy {hit_meter.mean():.4f}")
                    loss_meter.reset()
                    hit_meter.reset()
                checkpoint.step()
        world.print(f"Training completed in {time.perf_counter() - start_s:.1f} s")


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help="number of this rank, if you start the ranks by hand")
    parser.add_argument("--world-size", "--world_size", type=int, default=1, help="number of ranks, if started by hand")
    parser.add_argument("--master-addr", "--master_addr", default="127.0.0.1", help="host of rank 0")
    parser.add_argument("--master-port", "--master_port", type=int, default=8889, help="port on that host")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank (default: 0.01)")
    parser.add_argument("--log-interval", type=int, default=100, help="steps between two log lines")
    here = Path("data") if Path("data/MNIST").exists() else None
    parser.add_argument("--data-dir", type=mnist, default=here, help="folder with MNIST (default: data, if there)")
    options = parser.parse_args()
    if options.rank is not None:
        by_hand(options)
    train(options)


if __name__ == "__main__":
    main()
