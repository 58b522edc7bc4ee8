"""The CNNs, the recipes by which they are trained, and layers with which they train faster on CPUs.

All CNNs map float32 images (N, 1, 28, 28) to log-probabilities of the ten digits, float32 (N, 10). Shares of time are
of a step of `Net`, on one thread of an x86-64 CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adadelta, Adam, Optimizer

from cluster_ddp import SpecError, World
from cluster_ddp.mnist.train_config import Amp, RecipeName, TrainConfig

Model = TypeVar("Model", bound=nn.Module)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; mallopt(3)
_ONE_GIB, _NEVER = 1 << 30, (1 << 31) - 1


class Net(nn.Module):
    """The CNN of PyTorch's MNIST example (github.com/pytorch/examples/tree/main/mnist): 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.pool = nn.MaxPool2d(2)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        # Pool before relu: the same values and gradients, on a quarter of the memory.
        x = F.relu(self.pool(self.conv2(x)).flatten(1))
        x = F.relu(self.fc1(self.dropout1(x)))
        return _log_probabilities(self.fc2(self.dropout2(x)))


class SmallNet(nn.Module):
    """A sixteenth of `Net`'s arithmetic: half the channels, max-pooling after each convolution, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(800, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)).flatten(1))
        return _log_probabilities(self.fc2(F.relu(self.fc1(x))))


class ConvNet(nn.Module):
    """Two 5x5 convolutions, each with batch normalisation, ReLU and max-pooling, and a linear layer. No dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return _log_probabilities(self.fc(x.flatten(1)))


def _log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(scores.float(), dim=1)  # in full precision under autocast on the CPU, too


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


def fast_cpu(model: Model) -> Model:
    """Make a model train faster on CPUs, before `world.wrap`. Its parameters and their names stay.

    - nn.Dropout, if its probability is a multiple of 1/256, draws a random byte for each value instead of a double: a
      fifth of the time of a step. It draws other random numbers.
    - nn.MaxPool2d works in channels_last, with the same bits: a contiguous input takes up to sixteen times as long.
      Images in channels_last help the convolutions, too: `images.to(memory_format=torch.channels_last)`.
    - malloc keeps freed memory, which the next step needs again (mallopt(3), glibc only): a fifth of the time of a
      step, in 5,000 page faults. The process keeps the memory of its largest step. If the environment has settings for
      malloc, they stay.

    On a GPU the layers do what torch's own do.

    Args:
        model: its layers are replaced in place.

    Returns:
        The same model.
    """
    keep_freed_memory(os.environ)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.Dropout and (256 * layer.p).is_integer() and layer.p < 1:
                setattr(parent, name, ByteDropout(layer.p).train(layer.training))
            elif type(layer) is nn.MaxPool2d and not layer.return_indices:
                setattr(parent, name, ChannelsLastMaxPool2d(layer).train(layer.training))
    return model


class ByteDropout(nn.Module):
    """Dropout (Srivastava et al. 2014) that on the CPU draws one random byte for each value.

    Args:
        p: probability of zero, below 1, a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values, in training mode only. The result has the shape and dtype of `x`."""
        if not self.training or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()] >= int(256 * self.p)
        return x * kept.view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))


class ChannelsLastMaxPool2d(nn.Module):
    """Max-pooling whose forward and backward pass on the CPU use channels_last, whatever the layout of the input.

    Args:
        layer: the plain one.
    """

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The maxima: (N, C, H, W) -> (N, C, smaller H, smaller W), of the same dtype."""
        if x.device.type != "cpu" or x.dim() != 4:
            return self.pool(x)  # type: ignore[no-any-return]
        maxima: torch.Tensor = self.pool(x.contiguous(memory_format=torch.channels_last))
        if maxima.requires_grad:
            maxima.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return maxima


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Let malloc keep freed memory, unless the environment (only read) has settings for malloc."""
    if any(name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in env[name]) for name in env):
        return
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _ONE_GIB)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
