"""What follows an epoch's last batch, in whatever order: told to stop or killed anywhere, it ends up the same."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from slowness import LIMIT_S, scaled
from torch.optim import lr_scheduler, swa_utils

import cluster_ddp
from cluster_ddp.runtime.checkpoint import checkpoint_file, folder
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

pytestmark = pytest.mark.full

EPOCHS, STEPS, EVALUATION_STEPS = 2, 4, 3


class Killed(BaseException):
    """Stands in for SIGKILL: nothing is done after it, but what is on disk."""


def kill(checkpoint: cluster_ddp.Checkpointer) -> None:
    checkpoint._folder.writer.wait()
    checkpoint.run_dir.sync()  # no thread may write on
    raise Killed


def stop(_: cluster_ddp.Checkpointer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@dataclass
class Training:
    """A small training. `at`: at which step, evaluation's included, `do` is done."""

    world: World
    path: Path
    every: str = "1epoch"
    at: int = -1
    do: Callable[[cluster_ddp.Checkpointer], None] = stop
    patient: bool = True
    batches: int = STEPS + 1
    stepless: tuple[int, ...] = ()
    before_batches: Callable[[Training], object] = lambda _: None
    """In each epoch, before its first batch."""
    before_step: Callable[[Training], object] = lambda _: None
    """In each batch, before the optimizer's step."""
    made: list[str] = field(default_factory=list)
    """What was done: "t0" is a step of the first epoch's training, "e0" the first epoch's evaluation as a whole."""

    def run(self, follow: Callable[[Training], None]) -> Any:
        """Bits of all that it has become; `follow` is what follows an epoch's last batch."""
        torch.manual_seed(1)
        data = torch.utils.data.TensorDataset(torch.randn(STEPS * 2, 3, generator=torch.Generator().manual_seed(5)))
        self.shard = self.world.shard(data, batch_size=2, shuffle_seed=1)
        self.model = self.world.wrap(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.7, patience=0, threshold=0.9)
        self.ema = swa_utils.AveragedModel(self.model.module)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}
        parts |= {"scheduler": self.scheduler, "plateau": self.plateau}
        self.run_dir = RunDir(self.path, self.world)
        options: dict[str, Any] = {"run_dir": self.run_dir, "every": self.every}
        self.checkpoint = cluster_ddp.Checkpointer(self.world, shard=self.shard, **options, **parts)
        self.ticks = 0
        for epoch in self.checkpoint.epochs(EPOCHS):
            self.epoch = epoch
            self.before_batches(self)
            self.model.train()
            for (samples,) in self.shard:
                self.optimizer.zero_grad()
                self.before_step(self)
                self.model(samples + torch.rand(())).square().mean().backward()
                self.optimizer.step()
                self.made.append(f"t{epoch}")
                self.run_dir.log("train", {"step": self.shard.step})
                self.tick()
                if self.shard.step in self.stepless:
                    continue
                self.checkpoint.step()
                if self.patient:
                    self.checkpoint._folder.writer.wait()
                if self.shard.step + 1 == self.batches:
                    break
            follow(self)
        self.run_dir.sync()
        states = [part.state_dict() for part in (self.model.module, self.optimizer, self.ema, self.scheduler)]
        return repr(states), b"".join(one.numpy().tobytes() for one in self.model.state_dict().values())

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self.at + 1:
            self.do(self.checkpoint)

    def evaluate(self, *, asks: bool = True) -> float:
        """With random numbers, and a line of the log."""
        self.model.eval()
        total = 0.0
        for _ in range(EVALUATION_STEPS):
            total += self.model(torch.rand(2, 3)).sum().item()
            self.tick()
            if asks:
                self.checkpoint.stop_if_asked()
        self.made.append(f"e{self.epoch}")
        self.run_dir.log("test", {"loss": total, "lr": self.optimizer.param_groups[0]["lr"]})
        return total


def scheduler_last(one: Training) -> None:
    one.evaluate()
    one.scheduler.step()


def scheduler_first(one: Training) -> None:
    one.scheduler.step()
    one.evaluate()


def without_asking(one: Training) -> None:
    one.scheduler.step()
    one.evaluate(asks=False)


def by_its_result(one: Training) -> None:
    one.plateau.step(one.evaluate())


def twice(one: Training) -> None:
    one.plateau.step(one.evaluate())
    one.scheduler.step()
    one.evaluate()


def with_the_weights_average(one: Training) -> None:
    """All of the model's and the average's tensors change before the evaluation."""
    one.ema.update_parameters(one.model.module)
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.mul_(0.9)
    one.evaluate()


def with_the_training_data(one: Training) -> None:
    """A second pass over the same shard, which has a place of its own in it."""
    one.scheduler.step()
    for (samples,) in one.shard:
        one.model(samples)
        one.checkpoint.stop_if_asked()
    one.evaluate()


ORDERS = [
    scheduler_last,
    scheduler_first,
    without_asking,
    by_its_result,
    twice,
    with_the_weights_average,
    with_the_training_data,
]


def lines(path: Path) -> list[Any]:
    """metrics.jsonl, without its times."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in found if line["kind"] != "steps"]


@pytest.mark.parametrize(
    ("do", "every", "follow"),
    [
        *((stop, "never", follow) for follow in ORDERS),
        *((stop, "1epoch", follow) for follow in (scheduler_first, twice)),
        *((kill, "3steps", follow) for follow in (scheduler_last, without_asking, with_the_training_data)),
    ],
)
def test_ended_anywhere_it_comes_to_the_same(
    world: World, tmp_path: Path, do: Any, every: str, follow: Callable[[Training], None]
) -> None:
    whole = Training(world, tmp_path / "whole")
    bits = whole.run(follow)
    for at in range(whole.ticks):
        path = tmp_path / f"{at}"
        first, second = Training(world, path, every, at, do), Training(world, path, every)
        with pytest.raises((Stopped, Killed)):
            first.run(follow)
        assert second.run(follow) == bits, at
        assert lines(path) == lines(whole.path), at
        if do is stop:  # nothing of the training, and no evaluation that was done, is made again
            assert first.made + second.made == whole.made or follow is twice, at


def evaluates_second_batch(one: Training) -> None:
    if one.shard.step == 1:
        one.evaluate()
        one.model.train()


@pytest.mark.parametrize(("do", "every"), [(stop, "never"), (stop, "1epoch"), (kill, "3steps")])
@pytest.mark.parametrize(
    "elsewhere",
    [{"before_batches": with_the_weights_average}, {"before_step": evaluates_second_batch}],
    ids=["before the batches", "before a step"],
)
def test_an_evaluation_elsewhere(
    world: World, tmp_path: Path, do: Any, every: str, elsewhere: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ended in it, a resume does it again, and loses no batch."""
    whole = Training(world, tmp_path / "whole", **elsewhere)
    bits = whole.run(scheduler_first)
    for at in range(whole.ticks):
        path = tmp_path / f"{at}"
        first, second = Training(world, path, every, at, do, **elsewhere), Training(world, path, every, **elsewhere)
        with pytest.raises((Stopped, Killed)):
            first.run(scheduler_first)
        assert second.run(scheduler_first) == bits, at
        assert lines(path) == lines(whole.path), at
    said = "Stopped after step 0 (epoch 1): rank 0: " in (out := capsys.readouterr().out)
    assert said == ("Nothing was trained: nothing to save." in out) == ("before_batches" in elsewhere and do is stop)


def keeps_smallest_weights(one: Training) -> None:
    """Training makes them smaller, so a resume inside an epoch has smaller ones here than at the epoch's beginning."""
    one.checkpoint.best("size", one.model.module[1].weight.norm().item(), mode="min")


def test_best_before_the_batches_keeps_nothing_that_a_resume_runs_again(world: World, tmp_path: Path) -> None:
    best = "checkpoints/best-size.pt"
    whole = Training(world, tmp_path / "whole", before_batches=keeps_smallest_weights)
    whole.run(scheduler_first)
    kept = checkpoint_file.read(tmp_path / "whole" / best)
    assert kept["position"]["steps"] == (EPOCHS - 1) * STEPS
    for at in (STEPS - 1, STEPS + EVALUATION_STEPS + 1):
        options: dict[str, Any] = {"every": "never", "before_batches": keeps_smallest_weights}
        with pytest.raises(Stopped):
            Training(world, tmp_path / f"{at}", at=at, **options).run(scheduler_first)
        Training(world, tmp_path / f"{at}", **options).run(scheduler_first)
        again = checkpoint_file.read(tmp_path / f"{at}" / best)
        assert again["position"]["steps"] == kept["position"]["steps"], at
        assert repr(again["parts"]["model"]) == repr(kept["parts"]["model"]), at


def trained_without_a_shard(world: World, path: Path, at: int = -1) -> bytes:
    """Before each step, evaluate with random numbers. The job is told to stop in batch `at`."""
    torch.manual_seed(1)
    model = world.wrap(torch.nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = cluster_ddp.Checkpointer(world, run_dir=path, every="never", model=model, optimizer=optimizer)
    for done in checkpoint.until(STEPS):
        for number in range(EVALUATION_STEPS):
            model(torch.rand(2, 3))
            if at == done * EVALUATION_STEPS + number:
                stop(checkpoint)
            checkpoint.stop_if_asked()
        optimizer.zero_grad()
        model(torch.rand(2, 3)).square().mean().backward()
        optimizer.step()
        checkpoint.step()
    return b"".join(one.numpy().tobytes() for one in model.state_dict().values())


def test_an_evaluation_before_a_step_without_a_shard(world: World, tmp_path: Path) -> None:
    bits = trained_without_a_shard(world, tmp_path / "whole")
    for at in range((STEPS - 1) * EVALUATION_STEPS):
        with pytest.raises(Stopped):
            trained_without_a_shard(world, tmp_path / f"{at}", at)
        assert trained_without_a_shard(world, tmp_path / f"{at}") == bits, at


def test_a_kill_in_an_evaluation_costs_that_evaluation_only(world: World, tmp_path: Path) -> None:
    """Of an epoch's end, the state is saved before the evaluation."""
    first, second = Training(world, tmp_path, at=STEPS + 1, do=kill), Training(world, tmp_path)
    with pytest.raises(Killed):
        first.run(scheduler_first)
    second.run(scheduler_first)
    assert first.made + second.made == ["t0"] * STEPS + ["e0"] + ["t1"] * STEPS + ["e1"]


def test_an_evaluation_stopped_again_and_again_is_made_from_its_beginning(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bits = Training(world, tmp_path / "whole").run(scheduler_first)
    path = tmp_path / "path"
    for at in (STEPS, 0, 2, 1):
        with pytest.raises(Stopped):
            Training(world, path, "never", at).run(scheduler_first)
        assert f"Stopped after step {STEPS} (epoch 1): rank 0" in capsys.readouterr().out
    assert Training(world, path, "never").run(scheduler_first) == bits


def test_a_stop_in_an_evaluation_while_a_slow_disk_is_written_to(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no copy of the last step then: that step is made again."""
    bits = Training(world, tmp_path / "whole").run(scheduler_first)
    write, path, is_asked = checkpoint_file.write, tmp_path / "path", threading.Event()

    def slowly(path: Path, state: Any) -> str:
        assert is_asked.wait(scaled(LIMIT_S))
        return write(path, state)

    def stop_then(checkpoint: cluster_ddp.Checkpointer) -> None:
        stop(checkpoint)
        is_asked.set()

    with monkeypatch.context() as patch:
        patch.setattr(folder.checkpoint_file, "write", slowly)
        with pytest.raises(Stopped):
            Training(world, path, "3steps", STEPS, stop_then, patient=False).run(scheduler_first)
    second = Training(world, path, "3steps")
    assert second.run(scheduler_first) == bits and second.made[0] == "t0"
    assert lines(path) == lines(tmp_path / "whole")


@pytest.mark.parametrize("options", [{"batches": STEPS}, {"stepless": (3,)}], ids=["break", "no step"])
@pytest.mark.parametrize("at", [STEPS, STEPS + 1])
def test_other_ends_of_the_loop(world: World, tmp_path: Path, options: dict[str, Any], at: int) -> None:
    """Left by a break in the last batch; or `step` is called every so many batches, and not after the last one."""
    bits = Training(world, tmp_path / "whole", **options).run(scheduler_first)
    with pytest.raises(Stopped):
        Training(world, tmp_path / "path", "never", at, **options).run(scheduler_first)
    assert Training(world, tmp_path / "path", "never", **options).run(scheduler_first) == bits


def test_epochs_that_are_broken_off_are_saved_at_their_end(world: World, tmp_path: Path) -> None:
    training = Training(world, tmp_path, batches=2)
    training.run(scheduler_first)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000002.pt",
        "step-00000004.pt",
    ]
    assert checkpoint_file.read(tmp_path / "checkpoints" / "step-00000002.pt")["position"]["epoch"] == 1
