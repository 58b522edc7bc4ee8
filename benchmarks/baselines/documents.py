"""MNIST under DDP as PyTorch's documents teach it: `[torchrun --nproc-per-node 2] benchmarks/baselines/documents.py`.

The model and recipe of PyTorch's MNIST example, with what the DDP tutorials add: a process group from the environment,
a DistributedSampler, the model wrapped with the defaults. Without a launcher it is a world of one. It ends with
a line of JSON (see `common.Watch`).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Net, Watch, make_parser, parsed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main() -> None:
    """Train for one epoch at most: the watch ends it."""
    options = parsed(make_parser(__doc__))
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(options.data_dir, train=True, transform=transform)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=options.batch_size, sampler=sampler, num_workers=options.workers, pin_memory=cuda
    )
    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank] if cuda else None)
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    watch = Watch(options)
    sampler.set_epoch(1)
    train(options, model, device, loader, optimizer, watch)
    scheduler.step()
    dist.destroy_process_group()


def train(
    options: argparse.Namespace,
    model: nn.Module,
    device: torch.device,
    loader: DataLoader[torch.Tensor],
    optimizer: Optimizer,
    watch: Watch,
) -> None:
    """The measured loop."""
    model.train()
    for batch_idx, (data, target) in enumerate(watch(loader)):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % options.log_interval == 0:
            print(f"Train Epoch: 1 [{batch_idx * len(data)}/{len(loader.dataset)}]\tLoss: {loss.item():.6f}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
