"""A training with the same updates on any number of ranks: it may shrink and grow between two starts.

python examples/any_number_of_ranks.py                                          one CPU or GPU
torchrun --nproc-per-node 3 examples/any_number_of_ranks.py                     three: the same losses but for rounding
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/any_number_of_ranks.py

docs/how-to/changing-nodes.md says how. No batch norm and no dropout: both differ where the ranks do.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp


def load(samples: int) -> TensorDataset:
    """Points (N, 16) around ten centres, and the number of each one's centre (N,)."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 16, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(samples, 16, generator=generator), labels)


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train, and print the mean loss of each epoch."""
    torch.manual_seed(1)
    model = world.wrap(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # whatever the number of ranks
    shard = world.shard(
        load(options.samples), global_batch=options.global_batch, batch_size=options.batch_size, shuffle_seed=1
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(shard))
    losses = cluster_ddp.Meter(world)
    meters, every = {"loss": losses}, options.every
    checkpoint = cluster_ddp.Checkpointer(
        world, shard=shard, every=every, meters=meters, model=model, optimizer=optimizer, scheduler=scheduler
    )
    for epoch in checkpoint.epochs(options.epochs):
        for points, labels in shard:
            with world.accumulate(model, shard) as is_last:
                loss = F.cross_entropy(model(points), labels)
                (loss * shard.loss_scale).backward()
            losses.add(loss * len(labels), len(labels))
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                checkpoint.step()
        mean_loss = losses.mean()
        losses.reset()
        world.print(f"epoch {epoch + 1}: loss {mean_loss:.5f} on {world.world_size} ranks, {checkpoint.steps} updates")
        world.log("train", epoch=epoch + 1, loss=mean_loss, samples_per_s=shard.samples_per_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000, help="points to train on")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=512, help="samples of an update, on all ranks together")
    parser.add_argument("--batch-size", type=int, default=64, help="the most that a rank computes at once")
    parser.add_argument("--every", default="1epoch", help="how often to save: 1epoch, 20steps, 10min")
    options = parser.parse_args()
    with cluster_ddp.distributed() as world:
        train(options, world)
