"""Ten samples an update on 1, 2 or 3 ranks, at a walking pace (PACE_S): the same losses, but for rounding.

It ends with its second epoch, or with a later one that begins after a number of requeues (REQUEUES).
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp

UPDATE, SAMPLES, EPOCHS = 10, 200, 2

with cluster_ddp.distributed(cuda=False) as world:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 5), torch.randn(SAMPLES, 1))
    net = nn.Linear(5, 1)
    model, optimizer = world.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    shard = world.shard(data, global_batch=UPDATE, shuffle_seed=1)  # on three ranks 4, 3 and 3
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, every="2steps")
    for epoch in checkpoint.epochs(1_000):
        for x, y in shard:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) * shard.loss_scale
            loss.backward()
            optimizer.step()
            total = world.sum(loss.item())
            world.log("train", epoch=epoch, step=checkpoint.steps + 1, loss=total / world.world_size)
            checkpoint.step()
            time.sleep(float(os.environ["PACE_S"]))
        is_requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= int(os.environ["REQUEUES"])
        if epoch + 1 >= EPOCHS and is_requeued:
            checkpoint.finish()
            break
