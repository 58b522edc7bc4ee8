"""What a script keeps in variables and objects of its own is named, and exact if it is in a part."""

from __future__ import annotations

import itertools
import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp import World
from cluster_ddp.errors import SpecError

CARRIES = "the script carries variables from step to step: {}. No checkpoint has that"
CHANGES = "objects of the script change: {}. No checkpoint has that"
calls = 0


class Parts:
    """A training of two epochs of three steps, with a save after each."""

    def __init__(self, world: World, run_dir: Path, **parts: Any) -> None:
        self.world, self.model = world, nn.Linear(2, 2)
        self.shard = world.shard(TensorDataset(torch.ones(12, 2)), batch_size=4, shuffle_seed=1)
        parts = {"model": self.model, **parts}
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=self.shard, run_dir=run_dir, every="1steps", **parts)

    def step(self) -> None:
        self.checkpoint.step()
        self.checkpoint._saver.wait()


class Average:
    """Of the weights; with a state_dict, or without."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow, self.updates = model, [one.detach().clone() for one in model.parameters()], 0

    def update(self) -> None:
        self.updates += 1
        for mean, one in zip(self.shadow, self.model.parameters()):
            mean.lerp_(one.detach(), 0.5)


class Trainer:
    """Keeps its count itself."""

    made = 0

    def __init__(self, parts: Parts) -> None:
        self.parts, self.steps, self.device = parts, 0, torch.device("cpu")
        Trainer.made = 0

    def train(self) -> None:
        for _ in self.parts.checkpoint.epochs(2):
            for _ in self.parts.shard:
                self.one_step()

    def one_step(self) -> None:
        self.steps += 1
        Trainer.made += 1
        self.parts.step()


def call() -> None:
    global calls
    calls += 1


def keeps_numbers(parts: Parts) -> None:
    best, waited = math.inf, 0
    for epoch in parts.checkpoint.epochs(2):
        total = 0.0
        for (x,) in parts.shard:
            loss = parts.model(x).sum().item()
            total += loss
            parts.step()
        if total < best:
            best, waited = total, epoch
        elif waited > 5:
            break


def draws_itself(parts: Parts) -> None:
    one, other, third = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
    fourth = np.random.RandomState(1)
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            torch.rand(1, generator=one)
            other.random(), third.random(), fourth.rand()
            parts.step()


def reads_another_iterator(parts: Parts) -> None:
    numbers = itertools.count()
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            next(numbers)
            parts.step()


def fills_containers(parts: Parts) -> None:
    losses, seen, means, options = list[float](), dict[int, int](), torch.zeros(2), Namespace(lr=0.1, name="a")
    for epoch in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            losses.append(1.0)
            seen[epoch] = 1
            means += 1
            options.lr *= 0.9
            parts.step()


def averages(parts: Parts) -> None:
    average = Average(parts.model)
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            average.update()
            parts.step()


def has_a_trainer(parts: Parts) -> None:
    Trainer(parts).train()


def calls_a_function(parts: Parts) -> None:
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            call()
            parts.step()


def keeps_nothing(parts: Parts) -> None:
    begun, device, names, world = 0.0, torch.device("cpu"), ["a"], parts.world

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return parts.model(x).sum() * world.world_size

    for epoch in parts.checkpoint.epochs(2):
        total = 0.0
        for i, (x,) in enumerate(parts.shard, start=parts.shard.step + 1):
            x = x.to(device)
            loss = loss_of(x)
            if i == 1:
                total = loss.item()
            parts.step()
        world.print(names[0], epoch, total, begun, loss.item())


def calls_a_function_for_each_epoch(parts: Parts) -> None:
    def one_epoch(epoch: int, noise: torch.Tensor, shown: list[int]) -> None:
        order = torch.randperm(2)
        for _ in parts.shard:
            shown.append(epoch)
            one_step(noise + order)

    def one_step(noise: torch.Tensor) -> None:
        noise.add_(1)
        parts.step()

    shown = list[int]()
    for epoch in parts.checkpoint.epochs(2):
        one_epoch(epoch, torch.rand(2), shown)


def reads_its_shard_by_hand(parts: Parts) -> None:
    def batches() -> Iterator[Any]:
        yield from parts.shard

    for _ in parts.checkpoint.epochs(2):
        for _ in batches():
            parts.step()


SAID = {
    keeps_numbers: [CARRIES.format("best, total, waited")],
    draws_itself: [CHANGES.format("fourth, one, other, third")],
    reads_another_iterator: [CARRIES.format("numbers")],
    fills_containers: [CARRIES.format("means"), CHANGES.format("losses, options"), CHANGES.format("seen")],
    averages: [CHANGES.format("average.shadow, average.updates")],
    has_a_trainer: [CHANGES.format("Trainer.made, Trainer.steps")],
    calls_a_function: [CARRIES.format("calls")],
    calls_a_function_for_each_epoch: [CHANGES.format("shown")],
    keeps_nothing: [CARRIES.format("total")],
    reads_its_shard_by_hand: [],
}


@pytest.mark.parametrize("train", SAID)
def test_what_a_script_keeps_is_named_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Callable[[Parts], None]
) -> None:
    train(Parts(world, tmp_path / "run"))
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == len(SAID[train])
    for words, one in zip(SAID[train], said):
        assert words in one


def test_variables_in_a_part_are_restored_and_not_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int) -> SimpleNamespace:
        kept = SimpleNamespace(best=math.inf, shown=[], means=torch.zeros(2))
        parts = Parts(world, tmp_path / "run", kept=kept)
        for epoch in parts.checkpoint.epochs(2):
            for _ in parts.shard:
                kept.best = min(kept.best, 10 - parts.checkpoint.steps)
                kept.shown.append(epoch)
                kept.means += 1
                parts.step()
                if parts.checkpoint.steps == steps:
                    return kept
        return kept

    train(4)
    kept = train(6)
    assert (kept.best, kept.shown, kept.means.tolist()) == (5, [0, 0, 0, 1, 1, 1], [6, 6])
    assert not caplog.records


@pytest.mark.parametrize("given", [0.0, None, [], Average(nn.Linear(1, 1))])
def test_a_part_without_a_state_is_refused(world: World, tmp_path: Path, given: object) -> None:
    words = r"Saving the part 'kept'.*has no state_dict\(\).*types.SimpleNamespace\(best=0.0\)"
    with pytest.raises(SpecError, match=f"(?s){words}"):
        Parts(world, tmp_path / "run", kept=given)
