"""Trainings as users write them, killed and resumed: they end with the bits and the records of an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from exact_resume import Point, equal_after_kill
from torch.optim import SGD
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.runtime.world import World


def data(size: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator))


def net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))


def draw_at_the_end(world: World, point: Point) -> dict[str, Any]:
    """After the loop over the epochs, the script draws a sample."""
    model = world.wrap(net())
    optimizer = SGD(model.parameters(), 0.1)
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    world.seed_rank(2)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
    for _ in checkpoint.epochs(2):
        for x, y in shard:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
    point("end", checkpoint.steps)
    world.log("sample", sum=model.module(torch.randn(5, 8)).sum().item())
    return {"model": model.state_dict()}


def test_after_end(tmp_path: Path) -> None:
    """A start that finds all epochs done has the random numbers of the end."""
    equal_after_kill(draw_at_the_end, tmp_path, kill=("end", 12))
