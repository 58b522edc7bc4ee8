"""Forward, backward and update of a batch. Precision and memory layout are decided here."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cluster_ddp import Shard, World
from cluster_ddp.mnist import cuda_graphs
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.mnist.fast_cpu import FAST, fastest, tune_malloc
from cluster_ddp.mnist.recipes import LAYOUTS, Recipe

_IMAGE = (1, 28, 28)


class Step:
    """Model and optimizer, and the forward, backward and update of a batch.

    Args:
        config: the options.
        recipe: the one that they name, with their values.
        world: of the ranks.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, world: World) -> None:
        self._recipe, self._world, self._gamma = recipe, world, config.gamma
        if config.cuda_graph:
            cuda_graphs.prepare(world)
        if recipe.amp == "off":
            # torch's default for convolutions is TF32 (10 bits of mantissa); for matrix products it is float32 already.
            # The newer fp32_precision is not used: once it is set, reading this flag is an error, and torch reads it.
            torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(config.seed)
        if world.device.type == "cpu":
            tune_malloc(os.environ)
        self.model = world.wrap(FAST[recipe.model]())
        for parameter in self.model.parameters():
            parameter.register_hook(_in_order)
        world.seed_rank(config.seed)
        self.optimizer = recipe.optimizer(self.model.parameters(), recipe.lr)
        self.layout = recipe.layout
        self.is_tuned = False
        # The other tensors that a step reads and writes. A graph always uses the same ones.
        self._mean_batch, self._loss = torch.ones((), device=world.device), torch.zeros((), device=world.device)
        self._lr: torch.Tensor | None = None
        self._graphed_gradients: cuda_graphs.Graphed | None = None
        self._apply_gradients: Callable[[], object] = self.optimizer.step
        if config.cuda_graph:
            self._use_graphs()

    def backward(self, images: torch.Tensor, labels: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Compute the gradients of the mean loss over the global batch, the same on all ranks.

        Args:
            images: float32 (N, 1, 28, 28).
            labels: int64 (N,).
            shard: where the batch comes from.

        Returns:
            The loss, summed over this rank's batch: float32, shape ().
        """
        self._mean_batch.fill_(shard.mean_batch)
        if self._graphed_gradients is None:
            self._gradients(images, labels)
        else:
            self._graphed_gradients(images, labels, full_batch=shard.is_full_batch)
        return self._loss.clone()

    def update(self, epochs_done: float) -> None:
        """Make the optimizer's step, with the recipe's learning rate after `epochs_done` epochs (a fraction counts)."""
        recipe = self._recipe
        lr = recipe.lr * recipe.schedule(epochs_done, recipe.epochs, self._gamma)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self._lr is None else self._lr.fill_(lr)
        self._apply_gradients()

    def _gradients(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.nll_loss(self._output(self.model, images, self.layout), labels, reduction="sum")
        (loss / self._mean_batch).backward()
        self._loss.copy_(loss.detach())

    def _use_graphs(self) -> None:
        """Launch each half of the step as one CUDA graph from now on."""
        self._lr = torch.tensor(self._recipe.lr, device=self._world.device)
        for group in self.optimizer.param_groups:
            group["capturable"] = self._world.device.type == "cuda"
        self._graphed_gradients = cuda_graphs.Graphed(self._gradients)
        self._apply_gradients = cuda_graphs.Graphed(self.optimizer.step)

    @torch.inference_mode()
    def output(self, images: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, float32 (N, 10), of images, float32 (N, 1, 28, 28), without communication."""
        return self._output(self.model.module, images, self.layout)

    def tune(self) -> dict[str, float]:
        """Time the memory layouts with the recipe's batch size, and take the fastest. A collective.

        Returns:
            Seconds of a forward and backward pass by layout, on the slowest rank.
        """
        batch_size = self._recipe.batch_size
        model = copy.deepcopy(self.model.module).train()
        images = torch.ones(batch_size, *_IMAGE, device=self._world.device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=self._world.device)

        def step(layout: str) -> None:
            F.nll_loss(self._output(model, images, layout), labels).backward()

        self.layout, seconds = fastest(self._world, {name: functools.partial(step, name) for name in LAYOUTS})
        self.is_tuned = True
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """The memory layout, and whether it was timed: bits depend on it."""
        return {"layout": self.layout, "is_tuned": self.is_tuned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the same layout."""
        self.layout, self.is_tuned = state["layout"], state["is_tuned"]

    def _output(self, model: torch.nn.Module, images: torch.Tensor, layout: str) -> torch.Tensor:
        images = images.to(memory_format=LAYOUTS[layout])
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._recipe.amp == "bf16"):
            output: torch.Tensor = model(images)
        return output


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    """Give a gradient the strides of DDP's buckets. Under channels_last, a convolution's gradient has others."""
    return gradient.reshape(-1).view(gradient.shape)
