"""A training that ends before all its epochs, such as by early stopping, trains no further when it is resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.world import World

pytestmark = pytest.mark.full

At = Callable[[Checkpointer], object]


def nothing(checkpoint: Checkpointer) -> None:
    """Is done at the end of an epoch."""


class Training:
    """Epochs of four steps, with a scheduler's step after each."""

    def __init__(self, world: World, path: Path, **options: Any) -> None:
        torch.manual_seed(1)
        self.shard = world.shard(TensorDataset(torch.rand(16, 2), torch.rand(16, 1)), batch_size=4, shuffle_seed=1)
        self.model = world.wrap(torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpoint = Checkpointer(world, shard=self.shard, run_dir=path, **parts, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(x) - y).square().mean().backward()
        self.optimizer.step()
        self.checkpoint.step()

    def epochs(self, count: int, *, at_end: At = nothing) -> list[int]:
        """Train, and return the epochs. It is left where `at_end` returns something."""
        done = []
        for epoch in self.checkpoint.epochs(count):
            for x, y in self.shard:
                self.step(x, y)
            self.scheduler.step()
            done.append(epoch)
            if at_end(self.checkpoint):
                break
        return done

    def weights(self) -> list[float]:
        return [*self.model.module.weight.flatten().tolist(), *self.optimizer.state_dict()["param_groups"][0].values()]


def finish_at(epoch: int, *, then_break: bool) -> At:
    def at_end(checkpoint: Checkpointer) -> bool:
        if checkpoint.epoch == epoch:
            checkpoint.finish()
            return then_break
        return False

    return at_end


@pytest.mark.parametrize("then_break", [True, False])
@pytest.mark.parametrize("every", ["1epoch", "1steps", "1000steps"])
def test_a_resume_trains_no_further(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], every: str, then_break: bool
) -> None:
    first = Training(world, tmp_path, every=every)
    assert first.epochs(9, at_end=finish_at(1, then_break=then_break)) == [0, 1]
    again = Training(world, tmp_path)
    assert again.epochs(9) == [] and again.checkpoint.steps == 8
    assert again.weights() == first.weights()
    last = tmp_path / "checkpoints" / "step-00000008.pt"
    assert "checkpoint.finish() ended this training at step 8: nothing to train." in (out := capsys.readouterr().out)
    assert f"resume='{last}'" in out
    Training(world, tmp_path).checkpoint.finish()
    assert checkpoint_file.read(last)["position"] == {"steps": 8, "epoch": 2, "finished": True, "left_at": None}


def test_it_may_be_called_after_the_loop(world: World, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first = Training(world, tmp_path)
    assert signal.getsignal(signal.SIGUSR1) != before
    first.epochs(9, at_end=lambda checkpoint: checkpoint.epoch == 1)  # break
    first.checkpoint.finish()
    assert signal.getsignal(signal.SIGUSR1) in (before, signal.SIG_IGN)
    assert Training(world, tmp_path).epochs(9) == []


def test_also_after_a_loop_that_came_to_its_end(world: World, tmp_path: Path) -> None:
    first = Training(world, tmp_path)
    first.epochs(2)
    first.checkpoint.finish()
    first.checkpoint.finish()
    assert Training(world, tmp_path).epochs(3) == []


def test_in_the_middle_of_an_epoch(world: World, tmp_path: Path) -> None:
    first = Training(world, tmp_path)
    for _ in first.checkpoint.epochs(9):
        for x, y in first.shard:
            first.step(x, y)
            if first.checkpoint.steps == 6:
                first.checkpoint.finish()
                break
    again = Training(world, tmp_path)
    assert again.epochs(9) == [] and again.checkpoint.steps == 6 and again.weights() == first.weights()


def test_a_step_after_it_is_an_error(world: World, tmp_path: Path) -> None:
    for training in (Training(world, tmp_path), Training(world, tmp_path)):
        training.checkpoint.finish()
        with pytest.raises(SpecError, match=r"(?s)Step 1:.*the training was finished at step 0\..*leave the loop"):
            training.checkpoint.step()


def test_of_a_training_without_a_shard(world: World, tmp_path: Path) -> None:
    def steps() -> list[int]:
        checkpoint = Checkpointer(world, run_dir=tmp_path, model=torch.nn.Linear(1, 1))
        found = []
        for done in checkpoint.until(9):
            checkpoint.step()
            found.append(done)
            if checkpoint.steps == 3:
                checkpoint.finish()
        return found

    assert steps() == [0, 1, 2] and steps() == []


def test_another_run_may_train_on(world: World, tmp_path: Path) -> None:
    """With the same bits as one that was never finished: the epoch counts as done, with its scheduler's step."""
    whole = Training(world, tmp_path / "whole")
    whole.epochs(4)
    Training(world, tmp_path / "first").epochs(9, at_end=finish_at(1, then_break=True))
    for _ in range(2):  # the second time from its own, which is not finished
        second = Training(world, tmp_path / "second", resume=str(tmp_path / "first"))
        second.epochs(3 if second.checkpoint.steps == 8 else 4)
    assert second.checkpoint.steps == 16 and second.weights() == whole.weights()


def test_a_checkpoint_of_an_earlier_version_trains_on(world: World, tmp_path: Path) -> None:
    """It does not say whether it is the last one."""
    Training(world, tmp_path).epochs(9, at_end=finish_at(1, then_break=True))
    last = tmp_path / "checkpoints" / "step-00000008.pt"
    state = checkpoint_file.read(last)
    del state["position"]["finished"]
    checkpoint_file.write(last, state)
    assert Training(world, tmp_path).epochs(4) == [2, 3]
