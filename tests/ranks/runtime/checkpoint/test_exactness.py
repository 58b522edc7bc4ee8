"""Trainings as users write them, killed and resumed: they end with the bits and the records of an undisturbed one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, equal_after_kill
from torch.optim import SGD
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

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


class Resumable(IterableDataset[dict[str, torch.Tensor]]):
    """A loaded state says where the next pass begins, also that of an end. With a rank, workers have unequal shares."""

    def __init__(self, rank: int | None) -> None:
        self.rank, self.read, self.begin = rank, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        number = worker.id if worker and self.rank is not None else 0
        begin, self.begin = self.begin, 0
        for self.read in range(begin + 1, (30 if number else 70) + 1):
            generator = torch.Generator().manual_seed(1000 * (2 * (self.rank or 0) + number) + self.read)
            yield {"x": torch.randn(8, generator=generator) + 0.1 * torch.randn(8), "y": torch.tensor(self.read % 3)}


def read_states(world: World, point: Point, **options: Any) -> dict[str, Any]:
    model = world.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    stream = world.stream(Resumable(world.rank if options["split"] == "own" else None), batch_size=4, **options)
    world.seed_rank(3)
    checkpoint = cluster_ddp.Checkpointer(world, shard=stream, model=model, optimizer=optimizer, every="2steps")
    for _ in checkpoint.epochs(3):
        for batch in stream:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            world.log("train", step=checkpoint.steps + 1, loss=loss.item(), seen=stream.seen)
            checkpoint.step()
            point("after", checkpoint.steps)
        point("epoch", checkpoint.steps)
        world.log("epoch", size=stream.size)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({"split": "own"}, [("epoch", 18)]),
        pytest.param({"split": "own", "num_workers": 2}, [("epoch", 26), ("after", 47)], marks=pytest.mark.full),
        pytest.param(
            {"split": "own", "num_workers": 2, "persistent_workers": True}, [("after", 20)], marks=pytest.mark.full
        ),
        pytest.param({"split": "items"}, [("epoch", 9)], marks=pytest.mark.full),
        pytest.param({"split": "items", "num_workers": 2}, [("epoch", 9), ("after", 13)], marks=pytest.mark.full),
    ],
    ids=["one reader", "res2", "res2 persistent", "items", "items workers"],
)
def test_readers_with_a_state(tmp_path: Path, options: dict[str, Any], kills: list[tuple[str, int]]) -> None:
    """Killed between two epochs, and in the midst of one where one reader has ended."""
    equal_after_kill(functools.partial(read_states, **options), tmp_path, kill=kills)
