"""MNIST on one CPU or GPU, in plain PyTorch. mnist_ddp_plain.py is the same training on several.

python examples/mnist_single.py --epochs 1
"""

import argparse
import os
import shlex
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data
from torchvision import datasets, transforms


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
    from cluster_ddp.mnist import data as mnist_data

    digits = mnist_data.load("digits", Path())[0 if train else 1]
    return data.TensorDataset(*digits.batch(torch.arange(len(digits))))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=64, help="samples per step (default: 64)")
parser.add_argument("--test-batch-size", type=int, default=1000, help="samples per step of the test (default: 1000)")
parser.add_argument("--epochs", type=int, default=14, help="number of epochs (default: 14)")
parser.add_argument("--lr", type=float, default=1.0, help="learning rate (default: 1.0)")
parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate per epoch (default: 0.7)")
parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even if there is a GPU")
parser.add_argument("--dropout", type=float, default=0.5, help="share of the last layer's inputs (default: 0.5)")
parser.add_argument("--dry-run", action="store_true", help="one step, to see that it works")
parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines of the log (default: 10)")
parser.add_argument("--save-model", action="store_true", help="save the weights as mnist_cnn.pt")
HERE = Path("data") if Path("data/MNIST").exists() else None
parser.add_argument("--data-dir", type=mnist, default=HERE, help="folder with MNIST (default: data, if it is there)")


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train, and test after each epoch."""
    print("Data:", options.data_dir or "the 1,797 digits of cluster_ddp, not MNIST")
    torch.manual_seed(options.seed)
    model = Net(options.dropout).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    workers = int(os.environ.get("SLURM_CPUS_PER_TASK", "0"))
    loader = data.DataLoader(load(options.data_dir, True), options.batch_size, shuffle=True, num_workers=workers)
    test_loader = data.DataLoader(load(options.data_dir, False), options.test_batch_size, num_workers=workers)
    for epoch in range(1 if options.dry_run else options.epochs):
        model.train()
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if step % options.log_interval == 0:
                share = f"{step}/{len(loader)} ({step / len(loader):.0%})"
                print(f"Train Epoch: {epoch + 1} [{share}]\tLoss: {loss.item():.6f}")
            if options.dry_run:
                break
        test(device, model, test_loader)
        scheduler.step()
    if options.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


def test(device: torch.device, model: nn.Module, loader: data.DataLoader[tuple[torch.Tensor, ...]]) -> None:
    """Print the mean loss and the accuracy of the test set."""
    model.eval()
    loss = correct = seen = 0.0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images.to(device))
            loss += F.nll_loss(output, labels.to(device), reduction="sum").item()
            correct += (output.argmax(1) == labels.to(device)).sum().item()
            seen += len(labels)
    print(f"Test set: Average loss: {loss / seen:.4f}, Accuracy: {correct:.0f}/{seen:.0f} ({correct / seen:.2%})")


if __name__ == "__main__":
    options = parser.parse_args()
    train(options, torch.device("cuda" if torch.cuda.is_available() and not options.no_cuda else "cpu"))
