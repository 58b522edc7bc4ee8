"""How a CNN is trained: the model, its optimizer, its learning rate, and the defaults of the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cluster_ddp import SpecError, World, lr_scale
from cluster_ddp.mnist.config import Amp, RecipeName, TrainConfig
from cluster_ddp.mnist.model import ConvNet, Net, SmallNet

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to train."""

    model: type[nn.Module]
    """Makes the CNN, with random weights."""
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]
    """Makes the optimizer from parameters and learning rate."""
    schedule: Callable[[float, int, float], float]
    """The factor on the learning rate, from the epochs done, the number of epochs, and `gamma`."""
    epochs: int
    batch_size: int
    """Samples per rank and step."""
    lr: float
    amp: Amp
    layout: str
    """Memory layout of the images, one of `LAYOUTS`, unless the layouts are timed."""

    def options(self) -> dict[str, Any]:
        """The fields that `TrainConfig` may change."""
        return {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "amp")}


def every_epoch(done: float, epochs: int, gamma: float) -> float:
    """The factor of torch's StepLR: `gamma` once for each epoch done."""
    return float(gamma ** int(done))


def one_cycle(done: float, epochs: int, gamma: float) -> float:
    """Rises linearly from 0.1 to 1 in the first fifth of the training, then falls linearly to 0 (Smith, Topin 2018)."""
    share, top = done / epochs, 0.2
    return 0.1 + 0.9 * share / top if share < top else (1 - share) / (1 - top)


def warm_up(done: float, epochs: float) -> float:
    """Rises linearly from 0.01 to 1 in the first `epochs` epochs (Goyal et al. 2017)."""
    return 1.0 if done >= epochs else 0.01 + 0.99 * done / epochs


def _adadelta(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.Adadelta(parameters, lr=lr)


def _adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.99), fused=True)


RECIPES: dict[RecipeName, Recipe] = {
    "reference": Recipe(
        model=Net,
        optimizer=_adadelta,
        schedule=every_epoch,
        epochs=14,
        batch_size=64,
        lr=1.0,
        amp="off",
        layout="contiguous",
    ),
    "fast": Recipe(
        model=SmallNet,
        optimizer=_adam,
        schedule=one_cycle,
        epochs=2,
        batch_size=256,
        lr=0.006,
        amp="bf16",
        layout="channels_last",
    ),
}


def chosen(config: TrainConfig, world: World) -> Recipe:
    """The recipe that a configuration names, with the options that the configuration sets.

    Raises:
        SpecError: the ranks can't share the global batch equally.
    """
    recipe = RECIPES[config.recipe]
    given = {name: value for name in recipe.options() if (value := getattr(config, name)) is not None}
    if config.global_batch_size is not None:
        given["batch_size"] = _batch_size(config.global_batch_size, world.world_size, config.accumulate)
    if config.model == "convnet":
        given["model"] = ConvNet
    return dataclasses.replace(recipe, **given)


def lr_factor(config: TrainConfig, recipe: Recipe, world: World) -> float:
    """The factor on the learning rate for the number of samples in an update (`--lr-scaling`)."""
    if config.lr_scaling == "none":
        return 1.0
    base = RECIPES[config.recipe].batch_size
    return lr_scale(world, recipe.batch_size * config.accumulate, base, config.lr_scaling)


def identity(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    """The options that must be the same to resume. Those that came later are in it only if they are used."""
    used = {
        "model": config.model if config.model != "cnn" else None,
        "accumulate": config.accumulate if config.accumulate > 1 else None,
        "lr_scaling": config.lr_scaling if config.lr_scaling != "none" else None,
        "warmup_epochs": config.warmup_epochs or None,
        "sync_batchnorm": "yes" if config.sync_batchnorm else None,
        "cuda_graph": "yes" if config.cuda_graph else None,
    }
    return {
        "dataset": config.dataset_name,
        "recipe": config.recipe,
        "lr": recipe.lr,
        "gamma": config.gamma,
        "amp": recipe.amp,
        **{name: value for name, value in used.items() if value is not None},
    }


def _batch_size(samples: int, ranks: int, batches: int) -> int:
    """Samples per rank and batch."""
    if samples % (ranks * batches):
        fitting = max(1, round(samples / (ranks * batches))) * ranks * batches
        found = f"{ranks} ranks with {batches} batches each can't share them equally."
        asked = f"Updates of {samples} samples (--global-batch-size):"
        raise SpecError(asked, found, f"--global-batch-size {fitting}")
    return samples // (ranks * batches)
