"""Trainings without a shard, and with several, resume exactly, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.rng import seed_all
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

pytestmark = pytest.mark.full


class Stop(BaseException):
    """Ends a training as a kill would: nothing more is written."""


@contextmanager
def stopping(checkpoint: Checkpointer, how: str) -> Iterator[None]:
    """Let the body end the training: by a kill, or as the time limit does."""
    if how == "asked":
        os.kill(os.getpid(), signal.SIGUSR1)
        yield
    else:
        checkpoint._saver.wait()
        checkpoint.run_dir._metrics.finish(60)
        raise Stop


def by_steps(world: World, path: Path, *, until: int = 12, stop: int = 0, how: str = "asked") -> list[float]:
    """A training on data that it makes itself, stopped in one of its steps."""
    seed_all(1)
    model = world.wrap(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpoint = Checkpointer(world, run_dir=path, every="4steps", model=model, optimizer=optimizer)
    losses = []
    for done in checkpoint.until(until):
        loss = model(torch.rand(4, 2) + done).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if done + 1 == stop:
            with stopping(checkpoint, how):
                checkpoint.step()
        else:
            checkpoint.step()
    return losses


@pytest.mark.parametrize(("how", "saved"), [("asked", 7), ("killed", 4)])
def test_a_training_without_a_shard_counts_steps(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, saved: int
) -> None:
    whole = by_steps(world, tmp_path / "whole")
    with pytest.raises((Stop, Stopped)):
        by_steps(world, tmp_path / "stopped", stop=7, how=how)
    capsys.readouterr()
    assert by_steps(world, tmp_path / "stopped") == whole[saved:]
    path = tmp_path / "stopped" / "checkpoints"
    assert capsys.readouterr().out == f"Resuming from {path}/step-{saved:08}.pt: step {saved}\n"
    assert by_steps(world, tmp_path / "stopped") == []
    assert "All is done already (12 steps): nothing to train." in capsys.readouterr().out


def two(world: World) -> dict[str, Any]:
    shards = [
        world.shard(TensorDataset(torch.arange(size)), batch_size=2, shuffle_seed=seed)
        for size, seed in ((12, 1), (8, 2))
    ]
    return {"shards": shards, "model": world.wrap(torch.nn.Linear(1, 1))}


def side_by_side(world: World, path: Path, *, stop: int = 0, how: str = "asked") -> list[Any]:
    """Each step takes a batch of both; the epoch is over when the shorter one is."""
    made = two(world)
    checkpoint = Checkpointer(world, shard=made["shards"], run_dir=path, every="1steps", model=made["model"])
    seen = []
    for epoch in checkpoint.epochs(3):
        for (one,), (other,) in zip(*made["shards"]):
            seen.append((epoch, one.tolist(), other.tolist()))
            if checkpoint.steps + 1 == stop:
                with stopping(checkpoint, how):
                    checkpoint.step()
            else:
                checkpoint.step()
                checkpoint._saver.wait()
    return seen


def one_after_the_other(world: World, path: Path, *, stop: int = 0, how: str = "asked") -> list[Any]:
    made = two(world)
    checkpoint = Checkpointer(world, shard=made["shards"], run_dir=path, every="1steps", model=made["model"])
    seen = []
    for epoch in checkpoint.epochs(2):
        for number, shard in enumerate(made["shards"]):
            for (batch,) in shard:
                seen.append((epoch, number, batch.tolist()))
                if checkpoint.steps + 1 == stop:
                    with stopping(checkpoint, how):
                        checkpoint.step()
                else:
                    checkpoint.step()
                    checkpoint._saver.wait()
    return seen


@pytest.mark.parametrize("train", [side_by_side, one_after_the_other])
def test_a_training_on_two_shards_resumes_in_both(world: World, tmp_path: Path, train: Any) -> None:
    whole = train(world, tmp_path / "whole")
    assert len(whole) == (12 if train is side_by_side else 20)
    for stop in range(1, len(whole)):
        for how, saved in (("asked", stop), ("killed", stop - 1)):
            path = tmp_path / f"{how}-{stop}"
            with pytest.raises((Stop, Stopped)):
                train(world, path, stop=stop, how=how)
            assert train(world, path) == whole[saved:], (stop, how)


class Evaluations:
    """Counts evaluations, as a scheduler counts epochs."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def evaluated(world: World, path: Path, *, stop: bool) -> int:
    """Two epochs on two shards; the evaluation counts itself, then may be stopped."""
    made, evaluations = two(world), Evaluations()
    parts = {"model": made["model"], "evaluations": evaluations}
    checkpoint = Checkpointer(world, shard=made["shards"], run_dir=path, **parts)
    for _ in checkpoint.epochs(2):
        for _ in zip(*made["shards"]):
            checkpoint.step()
        evaluations.count += 1
        if stop:
            os.kill(os.getpid(), signal.SIGUSR1)
        checkpoint.stop_if_asked()
    return evaluations.count


def test_evaluations_that_are_stopped_again_and_again_count_once(world: World, tmp_path: Path) -> None:
    """When the shorter shard ends, the longer one has given a batch more."""
    for _ in range(3):
        with pytest.raises(Stopped):
            evaluated(world, tmp_path, stop=True)
    assert evaluated(world, tmp_path, stop=False) == 2


def test_what_does_not_fit_a_training_without_a_shard_is_said(world: World, tmp_path: Path) -> None:
    model = world.wrap(torch.nn.Linear(1, 1))
    with pytest.raises(SpecError, match="a training without a shard has no epochs"):
        Checkpointer(world, run_dir=tmp_path, every="2epochs", model=model)
    checkpoint = Checkpointer(world, run_dir=tmp_path, model=model)
    assert checkpoint._boundary._interval.unit == "min"
    with pytest.raises(SpecError, match=r"without a shard an epoch has no end.\n  Hint: .*until\(steps\)"):
        next(checkpoint.epochs(3))
    steps = checkpoint.until(3)
    next(steps)
    with pytest.raises(SpecError, match=r"Step 1 of 3:\n  it was not counted"):
        next(steps)
    shard = two(world)["shards"][0]
    with pytest.raises(SpecError, match="a training with a shard has epochs"):
        next(Checkpointer(world, shard=shard, run_dir=tmp_path / "other", model=model).until(3))
