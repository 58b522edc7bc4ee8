"""MNIST under DDP with cluster_ddp, on one process or on many. It resumes after a stop, with the same result.

python examples/mnist_ddp.py --epochs 1                                   one CPU or GPU
torchrun --nproc-per-node 4 examples/mnist_ddp.py --epochs 1              four, on this machine
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/mnist_ddp.py

steps of mnist_ddp_plain.py                      what makes them here
1. process group, 2. device                      cluster_ddp.distributed(), world.device
3. DDP, a seed for each rank                     world.wrap(), world.seed_rank()
4. samplers, set_epoch(), batches to the device  world.shard()
5. record on rank 0, 6. collect from all         world.print(), world.sum()
none: a stopped job loses its work               Checkpointer: epochs(), step()
"""

import argparse
import shlex
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data
from torchvision import datasets, transforms

import cluster_ddp
from cluster_ddp.mnist import data as mnist_data


class Net(nn.Module):
    """The CNN of PyTorch's MNIST example: two convolutions, two linear layers, 1.2 million weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        linear = nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10)
        self.layers = nn.Sequential(*convolutions, nn.Dropout(dropout / 2), nn.Flatten(), *linear, nn.LogSoftmax(dim=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        result: torch.Tensor = self.layers(images)
        return result


def mnist(folder: str) -> Path:
    """A folder that was named, if it has MNIST."""
    if not Path(folder, "MNIST").exists():
        fetch = f"python scripts/download_data.py --data-dir {shlex.quote(folder)}"
        raise argparse.ArgumentTypeError(f"there is no MNIST in {folder}. Hint: on a login node: {fetch}")
    return Path(folder)


def load(folder: Path | None, train: bool) -> datasets.MNIST | data.TensorDataset:
    """MNIST in a folder; without one, the 1,797 small digits that come with cluster_ddp."""
    if folder is not None:
        normalise = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
        return datasets.MNIST(folder, train, transform=normalise)
    digits = mnist_data.load("digits", Path())[0 if train else 1]
    return data.TensorDataset(*digits.batch(torch.arange(len(digits))))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=64, help="samples per step and rank (default: 64)")
parser.add_argument("--test-batch-size", type=int, default=1000, help="samples per step of the test (default: 1000)")
parser.add_argument("--epochs", type=int, default=14, help="number of epochs (default: 14)")
parser.add_argument("--lr", type=float, default=1.0, help="learning rate (default: 1.0)")
parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate per epoch (default: 0.7)")
parser.add_argument("--dropout", type=float, default=0.5, help="share of the last layer's inputs (default: 0.5)")
parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines of the log (default: 10)")
HERE = Path("data") if Path("data/MNIST").exists() else None
parser.add_argument("--data-dir", type=mnist, default=HERE, help="folder with MNIST (default: data, if it is there)")


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train, and test after each epoch."""
    world.print("Data:", options.data_dir or "the 1,797 digits of cluster_ddp, not MNIST")
    torch.manual_seed(options.seed)
    model = world.wrap(Net(options.dropout))
    world.seed_rank(options.seed)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    shard = world.shard(load(options.data_dir, True), batch_size=options.batch_size, shuffle_seed=options.seed)
    test_shard = world.shard(load(options.data_dir, False), batch_size=options.test_batch_size)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in checkpoint.epochs(options.epochs):
        model.train()
        for images, labels in shard:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if shard.step % options.log_interval == 0:
                share = f"{shard.step}/{len(shard)} ({shard.step / len(shard):.0%})"
                world.print(f"Train Epoch: {epoch + 1} [{share}]\tLoss: {loss.item():.6f}")
            checkpoint.step()
        test(world, model, test_shard)
        scheduler.step()


def test(world: cluster_ddp.World, model: nn.Module, shard: cluster_ddp.Shard) -> None:
    """Print the mean loss and the accuracy of the test set."""
    model.eval()
    loss = correct = seen = 0.0
    with torch.no_grad():
        for images, labels in shard:
            output = model(images)
            loss += F.nll_loss(output, labels, reduction="sum").item()
            correct += (output.argmax(1) == labels).sum().item()
            seen += len(labels)
    loss, correct, seen = world.sum(loss, correct, seen)
    world.print(f"Test set: Average loss: {loss / seen:.4f}, Accuracy: {correct:.0f}/{seen:.0f} ({correct / seen:.2%})")


options = parser.parse_args()
with cluster_ddp.distributed() as world:
    train(options, world)
