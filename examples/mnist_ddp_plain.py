"""MNIST under DistributedDataParallel, in plain PyTorch, on one process or on many. The six steps are numbered.

python examples/mnist_ddp_plain.py --epochs 1                             one CPU or GPU
torchrun --nproc-per-node 4 examples/mnist_ddp_plain.py --epochs 1        four, on this machine
sbatch examples/slurm/mnist_ddp_plain.sbatch                              by srun, on several nodes
WORLD_SIZE=4 RANK=0 python examples/mnist_ddp_plain.py --epochs 1         by hand, in four terminals: RANK=0, 1, 2, 3
"""

import argparse
import os
import shlex
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler
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


def load(folder: Path, train: bool) -> datasets.MNIST:
    """MNIST. Download it before the job, on a login node: compute nodes have no internet."""
    normalise = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
    return datasets.MNIST(folder, train, transform=normalise)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=64, help="samples per step and rank (default: 64)")
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
parser.add_argument("--data-dir", type=mnist, default="data", help="folder with MNIST (default: data)")


def place() -> tuple[int, int, int]:
    """This process's rank, its local rank (its number on its node), and the number of all ranks."""
    env = os.environ
    if "RANK" in env:  # torchrun sets these; by hand, you do
        return int(env["RANK"]), int(env.get("LOCAL_RANK", env["RANK"])), int(env["WORLD_SIZE"])
    if "SLURM_PROCID" in env:  # srun sets these; a batch script exports the rest
        return int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env.get("WORLD_SIZE", env["SLURM_NTASKS"]))
    return 0, 0, 1


def set_up(options: argparse.Namespace) -> torch.device:
    """Join the other ranks. Returns the device of this one."""
    # 1. The process group. The ranks are equal processes that run this script. They meet at rank 0's address and port.
    rank, local_rank, world_size = place()
    has_gpu = torch.cuda.is_available() and not options.no_cuda
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "8889")
    dist.init_process_group("nccl" if has_gpu else "gloo", rank=rank, world_size=world_size)
    # 2. The device: a GPU for each rank of a node. Without its number, all would share the first one.
    if not has_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train, and test after each epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # 3. The model in DDP, which copies rank 0's weights to all. Then a seed for each rank: each drops out other units.
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(Net(options.dropout).to(device))
    torch.manual_seed(options.seed + rank)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    # 4. A share of the data for each rank. A step sees world_size x batch_size samples; an epoch has fewer steps.
    train_set, test_set = load(options.data_dir, True), load(options.data_dir, False)
    sampler: DistributedSampler[object] = DistributedSampler(train_set, world_size, rank, seed=options.seed)
    workers = int(os.environ.get("SLURM_CPUS_PER_TASK", "0"))
    loader = data.DataLoader(train_set, options.batch_size, sampler=sampler, num_workers=workers)
    share = data.Subset(test_set, range(rank, len(test_set), world_size))  # the sampler would repeat some, to be even
    test_loader = data.DataLoader(share, options.test_batch_size, num_workers=workers)
    for epoch in range(1 if options.dry_run else options.epochs):
        sampler.set_epoch(epoch)  # or each epoch has the same order
        model.train()
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()  # DDP averages the gradients of all ranks here, so all ranks make the same step
            optimizer.step()
            # 5. Record on rank 0 only, or each line is there once per rank. This loss is that of rank 0's samples.
            if rank == 0 and step % options.log_interval == 0:
                done = f"{step}/{len(loader)} ({step / len(loader):.0%})"
                print(f"Train Epoch: {epoch + 1} [{done}]\tLoss: {loss.item():.6f}")
            if options.dry_run:
                break
        test(device, model, test_loader)
        scheduler.step()
    if options.save_model and rank == 0:
        torch.save(model.module.state_dict(), "mnist_cnn.pt")  # without DDP's prefix "module."


def test(device: torch.device, model: nn.Module, loader: data.DataLoader[tuple[torch.Tensor, ...]]) -> None:
    """Print the mean loss and the accuracy of the test set."""
    model.eval()
    sums = torch.zeros(3, device=device)  # of losses, of correct and of all samples
    with torch.no_grad():
        for images, labels in loader:
            output = model(images.to(device))
            sums[0] += F.nll_loss(output, labels.to(device), reduction="sum")
            sums[1] += (output.argmax(1) == labels.to(device)).sum()
            sums[2] += len(labels)
    # 6. Collect from all ranks: each has tested its own share. Every rank must make this call, or the others wait.
    dist.all_reduce(sums)
    loss, correct, seen = sums.tolist()
    if dist.get_rank() == 0:
        print(f"Test set: Average loss: {loss / seen:.4f}, Accuracy: {correct:.0f}/{seen:.0f} ({correct / seen:.2%})")


if __name__ == "__main__":
    options = parser.parse_args()
    train(options, set_up(options))
    dist.destroy_process_group()
