"""What DistributedDataParallel does, by hand: share the data, average the gradients. Its gradients are the same.

torchrun --nproc-per-node 4 examples/ddp_from_scratch.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/ddp_from_scratch.py
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import cluster_ddp
from cluster_ddp.mnist import data as mnist_data

BATCH_SIZE, STEPS = 32, 20


def network() -> nn.Module:
    """A small one, for images of 28 x 28 pixels and ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def partition(world: cluster_ddp.World) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches: every world_size-th sample of an order that all ranks draw alike."""
    digits, _ = mnist_data.load("digits", Path())  # 1,437 small images, which come with cluster_ddp
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(1))
    mine = order[world.rank :: world.world_size]
    for indices in mine.split(BATCH_SIZE)[:STEPS]:
        images, labels = digits.batch(indices)
        yield images.to(world.device), labels.to(world.device)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks.

    DDP does the same for buckets of gradients, from the last layer on, while the backward pass runs.
    """
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def update(model: nn.Module, lr: float) -> None:
    """SGD by hand."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(lr * parameter.grad)
            parameter.grad = None


def main() -> None:
    """Train one model by hand and one with DDP, and compare them after every step."""
    with cluster_ddp.distributed() as world:
        torch.manual_seed(0)  # the same weights on all ranks; DDP copies rank 0's
        model = network().to(world.device)
        reference = world.wrap(network())
        reference.module.load_state_dict(model.state_dict())
        loss = torch.zeros(())
        for images, labels in partition(world):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            F.cross_entropy(reference(images), labels).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            update(model, lr=0.05)
            update(reference, lr=0.05)
        world.print(f"{world.world_size} ranks, {STEPS} steps: gradients equal DDP's. Loss {world.mean(loss, 1):.4f}")


if __name__ == "__main__":
    main()
