"""Trainings as users write them, killed and resumed: they end with the bits and the records of an undisturbed one."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, data, equal_after_kill, net, records, run, succeed
from torch.optim import SGD
from torch.utils.data import IterableDataset, get_worker_info

import cluster_ddp
from cluster_ddp.runtime.world import World


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


def code_before_batches(world: World, point: Point, *, every: str, strategy: str = "ddp") -> dict[str, Any]:
    """Code of each epoch stands before its batches: a resume inside the epoch runs that again."""
    model: Any = world.wrap(net(), **({"strategy": "fsdp", "blocks": torch.nn.Linear} if strategy == "fsdp" else {}))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    losses = cluster_ddp.Meter(world)
    world.seed_rank(2)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every=every, meters={"losses": losses}, **parts)
    for epoch in checkpoint.epochs(3):
        losses.reset()
        if epoch == 0:
            model.load_state_dict(first)
        else:
            scheduler.step()
        if epoch == 1:
            optimizer.param_groups[0]["momentum"] /= 2
        if epoch == 2:
            torch.manual_seed(epoch + world.rank)
        shift = torch.rand(())
        for x, y in shard:
            loss = F.cross_entropy(model(x + shift + torch.rand(())), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.add(loss.detach() * len(x), len(x))
            checkpoint.step()
            checkpoint._saver.wait()
            point("stepped", checkpoint.steps)
        world.log("epoch", epoch=epoch, loss=losses.mean(), shift=shift.item())
        point("ended", checkpoint.steps)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({"every": "1steps"}, [("stepped", 3), ("stepped", 9), ("stepped", 14)]),
        pytest.param({"every": "1epoch"}, [("stepped", 8), ("ended", 12)], marks=pytest.mark.full),
        pytest.param({"every": "1steps", "strategy": "fsdp"}, [("stepped", 4), ("ended", 12)], marks=pytest.mark.full),
    ],
    ids=["inside", "at the end", "fsdp"],
)
def test_code_before_the_batches(tmp_path: Path, options: dict[str, Any], kills: list[tuple[str, int]]) -> None:
    """The parts, meters and random numbers are as at the step that is resumed from; that code has drawn the same."""
    equal_after_kill(functools.partial(code_before_batches, **options), tmp_path, kill=kills)


def log_after_step(world: World, point: Point) -> dict[str, Any]:
    """A record is logged after `checkpoint.step()`, when `checkpoint.steps` is its number."""
    model = world.wrap(net())
    optimizer = SGD(model.parameters(), 0.1)
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    world.seed_rank(2)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer, every="2steps")
    for epoch in checkpoint.epochs(3):
        for x, y in shard:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            point("stepped", checkpoint.steps)
            world.log("train", step=checkpoint.steps, loss=loss.item())
            point("logged", checkpoint.steps)
        world.log("epoch", epoch=epoch)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize(
    "kills",
    [
        [("stepped", 8), ("logged", 10)],
        pytest.param([("logged", 6), ("stepped", 12)], marks=pytest.mark.full),  # of an epoch's last batch
    ],
)
def test_logafter(tmp_path: Path, kills: list[tuple[str, int]]) -> None:
    """Each record exactly once, wherever a rank is killed."""
    equal_after_kill(log_after_step, tmp_path, kill=kills)


def log_after_step_and_stop(world: World, point: Point) -> dict[str, Any]:
    """As `log_after_step`; the first two starts get a warning in their third step, and stop some steps later."""
    starts = Path(os.environ["CLUSTER_DDP_RUN_DIR"], "starts")
    number = int(starts.read_text()) if starts.exists() else 0
    world.barrier()
    starts.write_text(str(number + 1))

    logged: list[int] = []

    def signalled(name: str, step: int) -> None:
        if name == "logged":
            logged.append(step)
            if len(logged) == 3 and number < 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        point(name, step)

    return log_after_step(world, signalled if "stopped" in str(starts) else point)


def test_logafter_stopped(tmp_path: Path) -> None:
    """The rest of the loop's body runs before the training stops."""
    succeed(log_after_step, tmp_path / "undisturbed")
    for _ in range(2):
        ends = run(log_after_step_and_stop, tmp_path / "stopped")
        assert [end.exit_code for end in ends] == [75, 75], ends
    succeed(log_after_step_and_stop, tmp_path / "stopped")
    assert (tmp_path / "stopped" / "end.json").read_text() == (tmp_path / "undisturbed" / "end.json").read_text()
    assert records(tmp_path / "stopped") == records(tmp_path / "undisturbed")


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


def code_after_step(world: World, point: Point) -> dict[str, Any]:
    """What a body does after its step: an average, clipped weights, a scheduler, a learning rate, random numbers."""
    model: Any = world.wrap(net())
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    losses = cluster_ddp.Meter(world)
    world.seed_rank(2)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="2steps", meters={"losses": losses}, **parts)
    for _ in checkpoint.epochs(3):
        for x, y in shard:
            checkpoint._saver.wait()
            point("begun", checkpoint.steps)
            loss = F.cross_entropy(model(x + torch.rand(())), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            average.update_parameters(model.module)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.3, 0.3)
            scheduler.step()
            optimizer.param_groups[0]["momentum"] *= 0.9
            losses.add(loss.detach(), 1)
            torch.rand(1 + world.rank)
            random.random()
            np.random.rand()
        checkpoint._saver.wait()
        point("epoch's end", checkpoint.steps)
    loss = losses.mean()
    return {**{name: part.state_dict() for name, part in parts.items()}, "loss": {"mean": torch.tensor(loss)}}


def test_code_after_the_step(tmp_path: Path) -> None:
    kills = [("begun", 2), ("begun", 5), ("epoch's end", 6), ("epoch's end", 12), ("begun", 16)]
    equal_after_kill(code_after_step, tmp_path, kill=kills)
