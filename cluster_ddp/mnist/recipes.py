"""The recipes by which the CNNs are trained: model, optimizer, learning rate, defaults of the options."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Adadelta, Adam, Optimizer

from cluster_ddp import SpecError, World
from cluster_ddp.mnist.model import ConvNet, Net, SmallNet
from cluster_ddp.train_options import Amp, RecipeName, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to train."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]  # of the learning rate
    schedule: Callable[[float, int, float], float]  # the factor on it, of epochs done, number of epochs, and `gamma`
    epochs: int
    batch_size: int  # samples per rank and step
    lr: float
    amp: Amp

    def options(self) -> dict[str, Any]:
        """The fields that `TrainConfig` may change."""
        return {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "amp")}


def step_lr(done: float, epochs: int, gamma: float) -> float:
    """The factor of torch's StepLR: `gamma` once for each epoch done."""
    return float(gamma ** int(done))


def one_cycle(done: float, epochs: int, gamma: float) -> float:
    """Rises linearly from 0.1 to 1 in the first fifth of the training, then falls linearly to 0 (Smith, Topin 2018)."""
    share, top = done / epochs, 0.2
    return 0.1 + 0.9 * share / top if share < top else (1 - share) / (1 - top)


def warm_up(done: float, epochs: float) -> float:
    """Rises linearly from 0.01 to 1 in the first `epochs` epochs (Goyal et al. 2017)."""
    return 1.0 if done >= epochs else 0.01 + 0.99 * done / epochs


_adam = functools.partial(Adam, betas=(0.9, 0.99), fused=True)
RECIPES: dict[RecipeName, Recipe] = {
    "reference": Recipe(model=Net, optimizer=Adadelta, schedule=step_lr, epochs=14, batch_size=64, lr=1.0, amp="off"),
    "fast": Recipe(model=SmallNet, optimizer=_adam, schedule=one_cycle, epochs=2, batch_size=256, lr=0.006, amp="bf16"),
}


def chosen(config: TrainConfig, world: World) -> Recipe:
    """The recipe that a configuration names, with the options that the configuration sets.

    Raises:
        SpecError: the ranks can't share the global batch equally.
    """
    recipe = RECIPES[config.recipe]
    given = {name: value for name in recipe.options() if (value := getattr(config, name)) is not None}
    if (samples := config.global_batch_size) is not None:
        sharing = world.world_size * config.accumulate
        if samples % sharing:
            found = f"{samples} is no multiple of ranks * --accumulate, {world.world_size} * {config.accumulate}."
            hint = f"--global-batch-size {max(1, round(samples / sharing)) * sharing}"
            raise SpecError(f"Updates of {samples} samples (--global-batch-size):", found, hint)
        given["batch_size"] = samples // sharing
    if config.model == "convnet":
        given["model"] = ConvNet
    return dataclasses.replace(recipe, **given)


def lr_factor(config: TrainConfig, recipe: Recipe, world: World) -> float:
    """The factor on the learning rate for the number of samples in an update (`--lr-scaling`).

    "linear" follows Goyal et al. 2017 (arXiv:1706.02677), "sqrt", for Adam, Malladi et al. 2022 (arXiv:2205.10287).
    """
    samples = world.world_size * recipe.batch_size * config.accumulate
    ratio = samples / RECIPES[config.recipe].batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def identity(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    """The options that must be the same to resume. Those that came later are in it only if they are used."""
    same = {"dataset": config.dataset_name, "recipe": config.recipe, "lr": recipe.lr, "gamma": config.gamma}
    later = ("model", "accumulate", "lr_scaling", "warmup_epochs", "sync_batchnorm", "cuda_graph")
    options = {option.name: option for option in dataclasses.fields(config)}
    used = {name: value for name in later if (value := getattr(config, name)) != options[name].default}
    return {**same, "amp": recipe.amp, **used}
