"""On three ranks, a gradient's place in DDP's buckets decides its last bits: a resume has the same buckets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, Training, equal_after_kill
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp import World

pytestmark = pytest.mark.full

WIDTH = 600
"""Wide enough for several buckets: the first one has 1 MiB."""


class OutOfOrder(nn.Module):
    """Uses its layers in another order than it defines them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, 3), nn.Linear(8, WIDTH)
        self.third, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.last(x)
        return out


class Words(nn.Module):
    """Two tables, one with sparse gradients, before the layers of `OutOfOrder`."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense, self.layers = nn.Embedding(20, 8, sparse=True), nn.Embedding(20, 8), OutOfOrder()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers((self.sparse(words) + self.dense(words)).mean(1))
        return out


def order_static(world: World, point: Point) -> Mapping[str, Any]:
    torch.manual_seed(1)
    model = world.wrap(OutOfOrder(), static_graph=True)
    return train(world, point, model, torch.randn(48, 8), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


def sparse_big(world: World, point: Point) -> Mapping[str, Any]:
    torch.manual_seed(1)
    model = world.wrap(Words())
    of_table = [model.module.sparse.weight]
    others = [one for one in model.parameters() if one is not of_table[0]]
    optimizers = torch.optim.Adam(others, 0.01), torch.optim.SparseAdam(of_table, 0.01)
    return train(world, point, model, torch.randint(20, (48, 5)), *optimizers)


def train(
    world: World, point: Point, model: nn.Module, inputs: torch.Tensor, *optimizers: torch.optim.Optimizer
) -> Mapping[str, Any]:
    world.seed_rank(2)
    shard = world.shard(TensorDataset(inputs, torch.randint(3, (48,))), batch_size=2, shuffle_seed=3)
    named: dict[str, Any] = {f"optimizer_{number}": one for number, one in enumerate(optimizers)}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="1steps", model=model, **named)
    for _ in checkpoint.epochs(2):
        for x, y in shard:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            checkpoint.step()
            point("after", checkpoint.steps)
    return {"model": model.state_dict(), **{name: one.state_dict() for name, one in named.items()}}


@pytest.mark.parametrize("training", [order_static, sparse_big])
def test_a_resume_on_three_ranks_adds_up_in_the_same_order(training: Training, tmp_path: Path) -> None:
    equal_after_kill(training, tmp_path, kill=("after", 6), ranks=3)
