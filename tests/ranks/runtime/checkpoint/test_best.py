"""The best checkpoint beside the newest, and weights from a checkpoint."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.errors import CheckpointError, SpecError
from cluster_ddp.runtime.checkpoint import checkpoint_file, saver
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.run_dir.background_writer import BackgroundWriter
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

pytestmark = pytest.mark.full


def train(world: World, path: Path, values: list[float], *, stop: int = -1, **options: Any) -> list[bool]:
    """An epoch of two steps for each value. The weight is the number of steps, and another one in the evaluation."""
    shard = world.shard(TensorDataset(torch.arange(8.0)), batch_size=4, shuffle_seed=1)
    model = world.wrap(torch.nn.Linear(1, 1))
    weight = model.module.weight.data
    weight.zero_()
    checkpoint = Checkpointer(world, shard=shard, run_dir=path, model=model, **options)
    found = []
    for epoch in checkpoint.epochs(len(values)):
        for _ in shard:
            weight += 1
            checkpoint.step()
        weight += 100  # as of an average of the weights
        found.append(checkpoint.best("accuracy", values[epoch], mode="max"))
        checkpoint.best("loss", -values[epoch], mode="min")
        if epoch == stop:
            os.kill(os.getpid(), signal.SIGUSR1)
        checkpoint.stop_if_asked()
        weight -= 100
    return found


def weight_of(path: Path) -> float:
    model = torch.nn.Linear(1, 1)
    assert cluster_ddp.load_weights(path, model).is_file()
    return model.weight.item()


def test_the_best_one_stays_as_it_was_after_its_last_batch(world: World, tmp_path: Path) -> None:
    assert train(world, tmp_path, [0.1, 0.5, math.nan, 0.5, 0.4], keep=1) == [True, True, False, False, False]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["best-accuracy.pt", "best-loss.pt", "step-00000010.pt"]
    assert weight_of(folder / "best-accuracy.pt") == weight_of(folder / "best-loss.pt") == 4
    assert weight_of(tmp_path) == weight_of(folder) == 10
    best_loss = folder / "best-loss.pt"
    assert checkpoint_file.digest(best_loss) and checkpoint_file.read(best_loss)["best"] == {"loss": -0.5}


def test_a_resumed_training_knows_the_best_one(world: World, tmp_path: Path) -> None:
    values = [0.1, 0.7, 0.3, 0.6, 0.8]
    with pytest.raises(Stopped):
        train(world, tmp_path, values, stop=2)
    assert train(world, tmp_path, values) == [False, False, True]  # epochs 2 (its evaluation again), 3 and 4
    assert weight_of(tmp_path / "checkpoints" / "best-accuracy.pt") == 10


def test_an_evaluation_that_a_resume_runs_again_is_the_best_again(world: World, tmp_path: Path) -> None:
    """Early stopping by what `best` returns would end the training."""
    values = [0.1, 0.7, 0.3]
    with pytest.raises(Stopped):
        train(world, tmp_path, values, stop=1)
    assert train(world, tmp_path, values) == [True, False]
    assert weight_of(tmp_path / "checkpoints" / "best-accuracy.pt") == 4


def test_the_best_one_of_steps_that_are_trained_again_is_not_the_best_of_now(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a start that was killed behind its newest checkpoint."""

    def train(values: list[float], last: int) -> list[bool]:
        model = world.wrap(torch.nn.Linear(1, 1))
        checkpoint = Checkpointer(world, run_dir=tmp_path, every="2steps", model=model)
        found = []
        for done in checkpoint.until(4):
            checkpoint.step()
            found.append(checkpoint.best("loss", values[done], mode="min"))
            checkpoint._saver.wait()
            if done + 1 == last:
                break
        return found

    assert train([0.5, 0.4, 0.3], last=3) == [True, True, True]
    assert train([9.0, 9.0, 0.35, 0.36], last=0) == [True, False]
    assert "best-loss.pt is of step 3, which is trained again: do not load it before that" in capsys.readouterr().out
    assert checkpoint_file.read(tmp_path / "checkpoints" / "best-loss.pt")["best"] == {"loss": 0.35}


def test_a_damaged_best_one_is_replaced(world: World, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    train(world, tmp_path, [0.9])
    best = tmp_path / "checkpoints" / "best-accuracy.pt"
    best.write_bytes(best.read_bytes()[:100])
    assert train(world, tmp_path, [0.9, 0.2]) == [True]
    assert f"The best checkpoint {best} can't be used: " in said.text
    assert weight_of(best) == 4


def test_a_best_one_that_could_not_be_written_is_not_the_best(
    world: World, tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_file.write

    def failing(path: Path, state: Any) -> str:
        if path.name == "best-accuracy.pt" and state["position"]["steps"] == 4:
            raise OSError(28, "No space left on device")
        return write(path, state)

    monkeypatch.setattr(checkpoint_file, "write", failing)
    assert train(world, tmp_path, [0.1, 0.9, 0.5]) == [True, True, True]
    assert "best-accuracy.pt failed: No space left on device" in said.text
    assert weight_of(tmp_path / "checkpoints" / "best-accuracy.pt") == 6


def test_a_save_that_was_given_up_is_whole_once_it_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one, for which a new copy would be made, is not written meanwhile."""
    goes_on, write = threading.Event(), checkpoint_file.write
    monkeypatch.setattr(checkpoint_file, "write", lambda path, state: goes_on.wait(60) and write(path, state))
    monkeypatch.setattr(BackgroundWriter, "is_stuck", lambda writer: not goes_on.is_set())
    monkeypatch.setattr(saver, "_REPORT_EVERY_S", 0.1)
    model = world.wrap(torch.nn.Linear(1, 1))
    checkpoint = Checkpointer(world, run_dir=tmp_path, every="1steps", model=model)
    for done in checkpoint.until(2):
        model.module.weight.data.fill_(done)
        checkpoint.step()
        model.module.weight.data.fill_(7.0)
        assert checkpoint.best("loss", 1.0, mode="min") == (done > 0)
        goes_on.set()
        checkpoint._saver.wait()
    assert weight_of(tmp_path / "checkpoints" / "step-00000001.pt") == 0


def test_the_last_step_that_could_not_be_written_is_written_though_it_is_the_best_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = checkpoint_file.write, Counter[str]()

    def failing(path: Path, state: Any) -> str:
        tries[path.name] += 1
        if path.name == "step-00000002.pt" and tries[path.name] == 1:
            raise OSError(28, "No space left on device")
        return write(path, state)

    monkeypatch.setattr(checkpoint_file, "write", failing)
    checkpoint = Checkpointer(world, run_dir=tmp_path, every="1steps", model=world.wrap(torch.nn.Linear(1, 1)))
    for _ in checkpoint.until(2):
        checkpoint._saver.wait()
        checkpoint.step()
        assert checkpoint.best("steps", checkpoint.steps)
    assert checkpoint.last_good == tmp_path / "checkpoints" / "step-00000002.pt"


def test_between_two_steps_the_state_of_that_moment_is_kept(world: World, tmp_path: Path) -> None:
    model = world.wrap(torch.nn.Linear(1, 1))
    checkpoint = Checkpointer(world, run_dir=tmp_path, every="never", model=model)
    for done in checkpoint.until(3):
        model.module.weight.data.fill_(done)
        checkpoint.step()
        checkpoint.best("loss", abs(done - 1.0), mode="min")
    assert weight_of(tmp_path / "checkpoints" / "best-loss.pt") == 1


@pytest.mark.parametrize(("name", "mode"), [("val/accuracy", "max"), ("", "max"), ("accuracy", "highest")])
def test_other_names_and_modes_are_refused(world: World, tmp_path: Path, name: str, mode: Any) -> None:
    checkpoint = Checkpointer(world, run_dir=tmp_path, model=torch.nn.Linear(1, 1))
    with pytest.raises(SpecError, match=r'best\("accuracy", value, mode="max"\)'):
        checkpoint.best(name, 0.5, mode=mode)


@pytest.fixture
def trained(world: World, tmp_path: Path) -> Path:
    train(world, tmp_path, [0.5])
    return tmp_path


def test_weights_are_loaded_into_wrapped_and_compiled_models(world: World, trained: Path) -> None:
    for model in (world.wrap(torch.nn.Linear(1, 1)), torch.compile(torch.nn.Linear(1, 1))):
        cluster_ddp.load_weights(str(trained), model)
        assert next(iter(model.parameters())).item() == 2


@pytest.mark.parametrize(
    ("model", "part", "words"),
    [
        (torch.nn.Linear(2, 1), "model", r"size mismatch for weight"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "model", r"Missing key\(s\) in state_dict: \"0.weight\""),
        (
            torch.nn.Linear(1, 1),
            "encoder",
            r"Loading 'encoder' from .*step-00000002.pt:\n  it holds model.\n  Hint: part='model'",
        ),
    ],
)
def test_weights_that_do_not_fit_are_a_short_error(
    trained: Path, model: torch.nn.Module, part: str, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        cluster_ddp.load_weights(trained, model, part=part)


def test_weights_that_are_missing_are_a_short_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no such file"):
        cluster_ddp.load_weights(tmp_path / "x.pt", torch.nn.Linear(1, 1))
