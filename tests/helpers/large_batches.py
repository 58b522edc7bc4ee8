"""A training for a GPU of little memory: `large_batches.py FITS FORM`.

The CPU stands in: the model raises the error that a GPU's allocator raises, for more samples than `FITS`. FORM is
"global_batch", "batch_size", "evaluates" (between two batches, more samples at once), or "fails" (a bug at step 2).
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp

fits, form = int(sys.argv[1]), sys.argv[2]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x):
        if len(x) > fits:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)}.00 MiB.")
        return self.layer(x)


with cluster_ddp.distributed() as world:
    torch.manual_seed(0)
    x = torch.randn(96, 3, dtype=torch.float64)
    model = world.wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = {"batch_size": 16} if form == "batch_size" else {"global_batch": 32}
    shard = world.shard(TensorDataset(x, x.sum(1, keepdim=True)), shuffle_seed=1, **size)
    test_shard = world.shard(TensorDataset(x), batch_size=48)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, every="1 steps")
    for _ in checkpoint.epochs(2):
        for x, y in shard:
            with world.accumulate(model, shard, every=None if "global_batch" in size else 1) as is_last:
                loss = ((model(x) - y) ** 2).mean() * (shard.loss_scale if "global_batch" in size else 1)
                loss.backward()
            if not is_last:
                continue
            if form == "evaluates":
                for (one,) in test_shard:
                    model.module(one)
            optimizer.step()
            optimizer.zero_grad()
            if form == "fails" and checkpoint.steps == 2:
                raise ValueError("a bug")
            checkpoint.step()
    weights = next(model.parameters())
    world.log("weights", weights=weights.flatten().tolist())
