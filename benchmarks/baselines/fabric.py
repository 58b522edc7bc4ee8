"""The same training with Lightning Fabric: `python benchmarks/baselines/fabric.py`. Prints JSON."""

from __future__ import annotations

import lightning_fabric
import torch
import torch.nn.functional as F
from common import Net, Watch, make_parser, parsed
from torch.optim import Adadelta
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main() -> None:
    """Train for one epoch at most: the watch ends it."""
    options = parsed(make_parser(__doc__))
    fabric = lightning_fabric.Fabric(accelerator="auto", strategy="ddp", devices=1)
    fabric.launch()
    fabric.seed_everything(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(options.data_dir, train=True, transform=transform)
    loader = fabric.setup_dataloaders(
        DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    )
    model = Net()
    model, optimizer = fabric.setup(model, Adadelta(model.parameters(), lr=1.0))

    watch = Watch(options)
    model.train()
    for batch_idx, (data, target) in enumerate(watch(loader)):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        fabric.backward(loss)
        optimizer.step()
        if batch_idx % options.log_interval == 0:
            fabric.print(f"Train Epoch: 1 [{batch_idx * len(data)}/{len(dataset)}]\tLoss: {loss.item():.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
