"""What a script makes at each start, and otherwise after a resume: it is named, or the objects are filled again."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import cluster_ddp
from cluster_ddp import World
from cluster_ddp.errors import CheckpointError

FIRST, ALL = 4, 6
"""Steps of the first start, which ends inside the second epoch; of the whole training."""


class Data(Dataset[torch.Tensor]):
    """Twelve samples, with a transform, soft labels and negatives that a training may change."""

    def __init__(self) -> None:
        self.x, self.soft, self.negatives = torch.ones(12, 2), torch.ones(12), [*range(12)]
        self.transform: Callable[[torch.Tensor], torch.Tensor] = Strong()
        self.cache: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache[index] = 1.0
        return self.transform(self.x[index])


class Strong:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Weak(Strong):
    pass


class ActNorm(nn.Module):
    """Initializes its bias from the first batch (Glow)."""

    def __init__(self, *, has_buffer: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        if has_buffer:
            self.register_buffer("is_initialized", torch.tensor(False))
        else:
            self.is_initialized = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_initialized:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                if isinstance(self.is_initialized, torch.Tensor):
                    self.is_initialized.fill_(True)
                else:
                    self.is_initialized = True
        return x + self.bias


class ActNormOfData(ActNorm):
    """Counts no writing to its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_initialized:
            self.bias.data.copy_(1 - x.mean(0).detach())
            self.is_initialized = True
        return x + self.bias


class Balance:
    """Divides a loss by its first value."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = loss.item()
        return loss / self.first


class RunningMean:
    def __init__(self) -> None:
        self.mean = 0.0


class Trainer:
    """A training of two epochs of three steps, saved after each, whose subclasses do more."""

    def __init__(self, world: World, run_dir: Path, steps: int) -> None:
        self.world, self.steps, self.data = world, steps, Data()
        torch.manual_seed(1)
        self.model = self.modules()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.before()
        shard = self.shard = world.shard(self.data, batch_size=4, shuffle_seed=1, **self.options())
        given: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **self.parts()}
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=run_dir, every="1steps", **given)
        self.after()
        self.train()

    def modules(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2))

    def before(self) -> None:
        """What it makes before its Checkpointer."""

    def options(self) -> dict[str, Any]:
        return {}

    def parts(self) -> dict[str, Any]:
        return {}

    def after(self) -> None:
        """What it makes after it."""

    def in_step(self) -> None:
        """What it changes in a step."""

    def after_epoch(self, epoch: int) -> None:
        """What it changes after an epoch."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def train(self) -> None:
        for epoch in self.checkpoint.epochs(2):
            for x in self.shard:
                loss = self.loss(x)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.in_step()
                self.checkpoint.step()
                self.checkpoint._saver.wait()
                if self.checkpoint.steps == self.steps:
                    return
            self.after_epoch(epoch)


class DividesByTheFirstLoss(Trainer):
    def before(self) -> None:
        self.balance = Balance()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.balance(super().loss(x))


class ReadsAnIterator(Trainer):
    def before(self) -> None:
        self.unlabelled = itertools.cycle([1.0, 2.0])

    def in_step(self) -> None:
        next(self.unlabelled)


class Reverse:
    strength = 0.0


class SetsAnAttributeOfAClass(Trainer):
    def before(self) -> None:
        Reverse.strength = 0.0

    def in_step(self) -> None:
        Reverse.strength += 0.1


class Collate:
    def __init__(self) -> None:
        self.batches, self.generator = 0, torch.Generator().manual_seed(1)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        return torch.stack(samples) + torch.rand((), generator=self.generator)


class CollatesByAnObject(Trainer):
    def options(self) -> dict[str, Any]:
        return {"collate_fn": Collate()}


def collate(samples: list[torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    return torch.stack(samples) + torch.rand((), generator=generator)


class CollatesByAPartial(Trainer):
    def options(self) -> dict[str, Any]:
        return {"collate_fn": functools.partial(collate, generator=torch.Generator().manual_seed(1)), "num_workers": 1}


class HasAnObjectInItsModel(Trainer):
    def modules(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model.running = RunningMean()  # type: ignore[assignment]
        return model

    def in_step(self) -> None:
        self.model.running.mean += 1.0  # type: ignore[union-attr, operator]


class NotesAtItsParameters(Trainer):
    def in_step(self) -> None:
        for one in self.model.parameters():
            one.norms = getattr(one, "norms", 0.0) + 1.0  # type: ignore[attr-defined]


class ReplacesAFunction(Trainer):
    def modules(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        model.activation = torch.relu  # type: ignore[assignment]
        return model

    def after_epoch(self, epoch: int) -> None:
        self.model.activation = nn.functional.softplus  # type: ignore[assignment]


class InitializesFromTheFirstBatch(Trainer):
    has_buffer = False

    def modules(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), ActNorm(has_buffer=self.has_buffer))


class InitializesPastAutograd(InitializesFromTheFirstBatch):
    def modules(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), ActNormOfData(has_buffer=False))


class HasAFlagInABuffer(InitializesFromTheFirstBatch):
    has_buffer = True


class HasACentreOfItsWeights(Trainer):
    def after(self) -> None:
        self.centre = self.model(torch.ones(2)).detach()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - self.centre - 1).square().mean()


class Observer(nn.Module):
    """Has a buffer that gets its shape from the first batch, as the observers of torch.ao.quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().amax(0))
        return x * self.largest

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *more: Any) -> None:
        self.largest = torch.empty_like(state_dict[f"{prefix}largest"])
        super()._load_from_state_dict(state_dict, prefix, *more)


class HasABufferThatGrows(Trainer):
    def modules(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), Observer())


class HasItBeforeItsCheckpointer(HasACentreOfItsWeights):
    def before(self) -> None:
        super().after()

    def after(self) -> None:
        """It has made it before."""


class HasItsOptimizer(Trainer):
    """Is a part itself, with the optimizer, which is another one."""

    def parts(self) -> dict[str, Any]:
        return {"trainer": self}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing changes."""


class RefinesLabels(Trainer):
    def in_step(self) -> None:
        self.data.soft[:4] = 0.5 * self.data.soft[:4] + self.checkpoint.steps


class MinesNegatives(Trainer):
    def after_epoch(self, epoch: int) -> None:
        self.data.negatives = self.data.negatives[::-1]


class ReplacesItsTransform(Trainer):
    def after_epoch(self, epoch: int) -> None:
        self.data.transform = Weak()


SAID: dict[type[Trainer], str] = {
    DividesByTheFirstLoss: "objects of the script change: DividesByTheFirstLoss.balance.first.",
    ReadsAnIterator: "the script carries variables from step to step: ReadsAnIterator.unlabelled.",
    SetsAnAttributeOfAClass: "objects of the script change: Reverse.strength.",
    CollatesByAnObject: "objects of the script change: collate_fn of shard 1.batches, collate_fn of shard 1.generator.",
    CollatesByAPartial: "collate_fn['generator'] draws random numbers, and is in no checkpoint.",
    HasAnObjectInItsModel: "objects of the script change: model.running.mean.",
    NotesAtItsParameters: "attributes of modules change: model.0.weight.norms, model.0.bias.norms.",
    ReplacesAFunction: "attributes of modules had other values before the resume: model.activation = 'a softplus'.",
    InitializesFromTheFirstBatch: "initialized themselves again after the resume: model.1.is_initialized.",
    InitializesPastAutograd: "initialized themselves again after the resume: model.1.is_initialized.",
    HasACentreOfItsWeights: "were others when the training began: HasACentreOfItsWeights.centre.",
    RefinesLabels: "the dataset had other attributes before the resume: dataset.soft.",
    MinesNegatives: "the dataset had other attributes before the resume: dataset.negatives.",
    ReplacesItsTransform: "the dataset had other attributes before the resume: dataset.transform = 'a Weak'.",
}


@pytest.mark.parametrize("trainer", SAID)
def test_what_a_script_keeps_or_makes_anew_is_named(
    trainer: type[Trainer], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(world, tmp_path / "run", FIRST)
    trainer(world, tmp_path / "run", ALL)
    assert SAID[trainer] in caplog.text


@pytest.mark.parametrize(
    "trainer", [Trainer, HasAFlagInABuffer, HasABufferThatGrows, HasItBeforeItsCheckpointer, HasItsOptimizer]
)
def test_what_is_exact_is_not(
    trainer: type[Trainer], world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = trainer(world, tmp_path / "undisturbed", ALL).model.state_dict()
    trainer(world, tmp_path / "run", FIRST)
    resumed = trainer(world, tmp_path / "run", ALL).model.state_dict()
    assert all(torch.equal(one, resumed[name]) for name, one in undisturbed.items())
    assert not caplog.records


class OfArrays:
    def state_dict(self) -> dict[str, Any]:
        return {"position": np.zeros(3)}

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Nothing is loaded."""


def test_what_cannot_be_saved_is_refused_before_the_training(world: World, tmp_path: Path) -> None:
    class HasArrays(Trainer):
        def parts(self) -> dict[str, Any]:
            return {"meters": {"env": OfArrays()}}

    words = r"state\['meters'\]\['env'\]\['position'\] is a ndarray that torch.load does not read"
    with pytest.raises(CheckpointError, match=words):
        HasArrays(world, tmp_path / "run", ALL)


def test_a_scaler_and_a_loader_of_an_earlier_training_are_not_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a second training in a notebook."""
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    loader = iter(torch.utils.data.DataLoader(Data()))
    next(loader)
    Trainer(world, tmp_path / "run", ALL)
    assert not (disabled.is_enabled() or caplog.records)


class HasOtherNames(Trainer):
    """Has a deque, a list, a tensor and an optimizer's group by other names, too."""

    def parts(self) -> dict[str, Any]:
        kept = SimpleNamespace(last=deque([0], maxlen=2), all=[0], sums=torch.zeros(2), by_name={"a": 0})
        self.last, self.all, self.sums, self.by_name = kept.last, kept.all, kept.sums, kept.by_name
        (self.group,) = self.optimizer.param_groups
        return {"kept": kept}

    def in_step(self) -> None:
        self.last.append(self.checkpoint.steps)
        self.all.append(self.checkpoint.steps)
        self.sums += 1
        self.by_name["a"] += 1
        self.group["lr"] *= 0.5

    @property
    def found(self) -> list[object]:
        return [self.last, self.all, self.sums.tolist(), self.by_name, self.optimizer.param_groups[0]["lr"]]


def test_objects_that_have_two_names_are_filled(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = HasOtherNames(world, tmp_path / "undisturbed", ALL)
    HasOtherNames(world, tmp_path / "run", FIRST)
    resumed = HasOtherNames(world, tmp_path / "run", ALL)
    assert resumed.found == undisturbed.found
    assert not caplog.records
