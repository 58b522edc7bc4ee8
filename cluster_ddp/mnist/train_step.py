"""Forward, backward and update of a batch. Precision and memory layout are decided here."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import profiler

from cluster_ddp import Shard, World
from cluster_ddp.mnist import cuda_graphs
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.mnist.fast_cpu import FAST, fastest, tune_malloc
from cluster_ddp.mnist.hyperparameters import LAYOUTS, Recipe, lr_factor, warm_up
from cluster_ddp.protocol import Env

_IMAGE = (1, 28, 28)
_NOTHING = contextlib.nullcontext()


class Step:
    """Model and optimizer, and the forward, backward and update of a batch.

    Args:
        config: the options.
        recipe: the one that they name, with their values.
        world: of the ranks.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, world: World) -> None:
        self._config, self._recipe, self._world = config, recipe, world
        self._lr_factor = lr_factor(config, recipe, world)
        self._range = ranges(world.device, enabled=config.trace is not None or Env.TRACE in os.environ)
        if config.cuda_graph:
            cuda_graphs.prepare(world)
        if recipe.amp == "off":
            # torch's default for convolutions is TF32 (10 bits of mantissa); for matrix products it is float32 already.
            # The newer fp32_precision is not used: once it is set, reading this flag is an error, and torch reads it.
            torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(config.seed)
        if world.device.type == "cpu":
            tune_malloc(os.environ)
        self.model = world.wrap(FAST.get(recipe.model, recipe.model)(), sync_batchnorm=config.sync_batchnorm)
        for parameter in self.model.parameters():
            parameter.register_hook(_in_order)
        world.seed_rank(config.seed)
        self.optimizer = recipe.optimizer(self.model.parameters(), recipe.lr)
        self.scaler = world.grad_scaler(torch.float16 if recipe.amp == "fp16" else torch.float32)
        self.layout = recipe.layout
        self.is_tuned = False
        # Of the current update: its batches so far are one or several (`--accumulate`).
        self.is_update_due, self.samples, self.mean_batch, self.progress = True, 0, 0.0, 0.0
        # The other tensors that a step reads and writes. A graph always uses the same ones.
        self._mean_batch, self._loss = torch.ones((), device=world.device), torch.zeros((), device=world.device)
        self._lr: torch.Tensor | None = None
        self._graphed_gradients: cuda_graphs.Graphed | None = None
        self._apply_gradients: Callable[[], object] = (
            self._scaled_step if self.scaler.is_enabled() else self.optimizer.step
        )
        if config.cuda_graph:
            self._use_graphs()

    def backward(self, images: torch.Tensor, labels: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Add a batch's part of the gradients of the mean loss over an update's samples, those of all ranks.

        After the update's last batch, `is_update_due` is True and all ranks have the same gradients. Then `samples` is
        the number of samples on this rank, `mean_batch` that of a rank on average, and `progress` the part of the epoch
        before the update.

        Args:
            images: float32 (N, 1, 28, 28).
            labels: int64 (N,).
            shard: where the batch comes from.

        Returns:
            The loss, summed over the update's samples on this rank so far: float32, shape ().
        """
        if is_first := self.is_update_due:
            self._begin(shard)
        self.samples += len(labels)
        every = self._config.accumulate
        with self._world.accumulate(self.model, shard, every=every) as self.is_update_due:
            if self._graphed_gradients is None:
                self._gradients(images, labels, is_first=is_first)
            else:
                self._graphed_gradients(images, labels, full_batch=shard.is_full_batch)
        return self._loss.clone()

    def update(self, epochs_done: float) -> None:
        """Make the optimizer's step, with the learning rate after `epochs_done` epochs (a fraction counts)."""
        recipe, config = self._recipe, self._config
        lr = recipe.lr * self._lr_factor * warm_up(epochs_done, config.warmup_epochs)
        lr *= recipe.schedule(epochs_done, recipe.epochs, config.gamma)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self._lr is None else self._lr.fill_(lr)
        with self._range("update"):
            self._apply_gradients()

    def share_buffers(self) -> None:
        """Give all ranks rank 0's statistics of batch normalisation, as DDP does before each batch. A collective."""
        buffers = list(self.model.module.buffers())
        if not buffers:
            return
        self._world.synchronize()
        for buffer, value in zip(buffers, self._world.broadcast([buffer.cpu() for buffer in buffers])):
            buffer.copy_(value)

    def _begin(self, shard: Shard) -> None:
        """Begin an update, with the first of its batches."""
        ranks = self._world.world_size
        before = round(shard.progress * shard.size)
        samples, left = self._recipe.batch_size * ranks * self._config.accumulate, shard.size - before
        if left - samples < ranks:  # the epoch's last update: too few are left for another one
            samples = left
        self.samples, self.progress, self.mean_batch = 0, shard.progress, samples / ranks
        self._mean_batch.fill_(self.mean_batch)

    def _gradients(self, images: torch.Tensor, labels: torch.Tensor, *, is_first: bool = True) -> None:
        if is_first:
            self.optimizer.zero_grad()
            self._loss.zero_()
        with self._range("forward"):
            loss = F.nll_loss(self._output(self.model, images, self.layout), labels, reduction="sum")
        with self._range("backward"):
            self.scaler.scale(loss / self._mean_batch).backward()
        self._loss.add_(loss.detach())

    def _scaled_step(self) -> None:
        """Divide the gradients by the scale and update, unless they are not finite. Then find a new scale."""
        self._world.synchronize()  # the scaler may read from the device whether to update
        self.scaler.step(self.optimizer)
        self.scaler.update()

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
        dtype = torch.float16 if self._recipe.amp == "fp16" else torch.bfloat16
        with torch.autocast(self._world.device.type, dtype, enabled=self._recipe.amp != "off"):
            output: torch.Tensor = model(images)
        return output


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    """Give a gradient the strides of DDP's buckets. Under channels_last, a convolution's gradient has others."""
    return gradient.reshape(-1).view(gradient.shape)


def ranges(device: torch.device, *, enabled: bool) -> Callable[[str], AbstractContextManager[object]]:
    """What names a part of a step, if enabled: in torch's profiles and, on GPUs, for Nsight Systems (NVTX)."""
    if not enabled:
        return lambda name: _NOTHING
    return _with_nvtx if device.type == "cuda" else profiler.record_function


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with profiler.record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()
