"""Every scheduler and optimizer of torch, a GradScaler and an average of the weights: stopped after every step.

Each comes back, bit for bit, to what it is without a stop. New ones of a later torch have to be added to the tables.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

import cluster_ddp
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

pytestmark = pytest.mark.full

SIZE, BATCH, EPOCHS = 12, 4, 4  # twelve steps


class Falling:
    """A function of the epoch with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def two(first: Any, then: Any, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])


# Each with milestones on both sides of several stops.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Falling()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7, 7, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: two(lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2, 4]), o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.MultiStepLR(o, [6, 8])]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=14, three_phase=True),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=6),
}

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0}]),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
NO_DDP = {"SparseAdam"}  # it wants sparse gradients


def classes(module: Any, base: type) -> set[str]:
    """The public classes of a module; ReduceLROnPlateau is a scheduler to torch since 2.2."""
    found = {name for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)}
    return {name for name in found if name[0] != "_"} - {base.__name__}


def test_the_tables_are_whole() -> None:
    assert classes(lr_scheduler, lr_scheduler.LRScheduler) | {"SWALR"} == set(SCHEDULERS)
    assert classes(torch.optim, Optimizer) == set(OPTIMIZERS) | NO_DDP


class Loop:
    """Model, optimizers, schedulers and what else takes part, made anew for each start."""

    def __init__(self, world: World, optimizer: str, schedulers: list[str]) -> None:
        torch.manual_seed(1)
        self.model = world.wrap(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.schedulers = {name: SCHEDULERS[name](self.optimizer) for name in schedulers}
        self.parts = {"model": self.model, "optimizer": self.optimizer, **self.schedulers}

    def step(self, samples: torch.Tensor) -> float:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = (self.model(samples) - 1).square().mean()
            loss.backward()
            return loss.item()

        loss = float(self.optimizer.step(closure))
        for scheduler in self.schedulers.values():
            arguments = [loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
            scheduler.step(*arguments)
        return loss


class Mixed(Loop):
    """Two optimizers, a scaled loss and a moving average beside the schedulers."""

    def __init__(self, world: World, optimizer: str, schedulers: list[str]) -> None:
        super().__init__(world, optimizer, schedulers)
        self.last = world.wrap(torch.nn.Linear(4, 1))
        self.other = torch.optim.RMSprop(self.last.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
        )
        self.parts |= {"last": self.last, "other": self.other, "scaler": self.scaler, "ema": self.ema}

    def step(self, samples: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        self.other.zero_grad()
        loss = self.last(self.model(samples)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.step(self.other)
        self.scaler.update()
        for scheduler in self.schedulers.values():
            scheduler.step()
        self.ema.update_parameters(self.model)
        return loss.item()


def train(world: World, path: Path, make: Callable[[World], Loop], *, stopped: bool) -> list[Any]:
    """What each step found, from the first to the last; and what all has become."""
    found, starts = [], 0
    while True:
        loop, starts = make(world), starts + 1
        data = torch.utils.data.TensorDataset(torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(5)))
        shard = world.shard(data, batch_size=BATCH, shuffle_seed=1)
        options: dict[str, Any] = {"run_dir": RunDir(path, world), "every": "never", "keep": 1}
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, **options, **loop.parts)
        try:
            for _ in checkpoint.epochs(EPOCHS):
                for (samples,) in shard:
                    loss = loop.step(samples)
                    found.append((loss, [float(group["lr"]) for group in loop.optimizer.param_groups]))
                    if stopped:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    checkpoint.step()
        except Stopped:
            continue
        assert starts == (1 + len(found) if stopped else 1) and len(found) == SIZE // BATCH * EPOCHS
        return [found, {name: getattr(part, "module", part).state_dict() for name, part in loop.parts.items()}]


def bits(value: Any) -> Any:
    """To be compared with ==."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().reshape(-1).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def comes_back(world: World, path: Path, make: Callable[[World], Loop]) -> bool:
    """Whether a training that is stopped after every step is the same as one that is not."""
    whole, pieces = (train(world, path / name, make, stopped=name == "pieces") for name in ("whole", "pieces"))
    return bits(whole) == bits(pieces)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_comes_back(world: World, tmp_path: Path, name: str) -> None:
    assert comes_back(world, tmp_path, lambda world: Loop(world, "SGD", [name]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_comes_back(world: World, tmp_path: Path, name: str) -> None:
    assert comes_back(world, tmp_path, lambda world: Loop(world, name, []))


def test_several_parts_at_once_come_back(world: World, tmp_path: Path) -> None:
    assert comes_back(world, tmp_path, lambda world: Mixed(world, "Adam", ["SequentialLR", "CosineAnnealingLR"]))
