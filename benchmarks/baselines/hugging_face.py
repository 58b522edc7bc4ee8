"""The same training with Hugging Face Accelerate: `python benchmarks/baselines/hugging_face.py`. Prints JSON.

(A file named accelerate.py would hide the library from itself.)
"""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Net, Watch, make_parser, parsed
from torch.optim import Adadelta
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main() -> None:
    """Train for one epoch at most: the watch ends it."""
    options = parsed(make_parser(__doc__))
    accelerator = Accelerator()
    set_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(options.data_dir, train=True, transform=transform)
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, Adadelta(model.parameters(), lr=1.0), loader)

    watch = Watch(options)
    model.train()
    for batch_idx, (data, target) in enumerate(watch(loader)):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        accelerator.backward(loss)
        optimizer.step()
        if batch_idx % options.log_interval == 0:
            accelerator.print(f"Train Epoch: 1 [{batch_idx * len(data)}/{len(dataset)}]\tLoss: {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
