"""Forward, backward and update of a batch. Precision and memory layout are decided here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from cluster_ddp import Shard, World
from cluster_ddp.mnist.cpu_layers import fast_cpu
from cluster_ddp.mnist.cuda_graphs import CudaGraphs
from cluster_ddp.mnist.recipes import Recipe, lr_factor, warm_up
from cluster_ddp.train_options import TrainConfig


class Step:
    """Model and optimizer, and the forward, backward and update of a batch."""

    def __init__(self, config: TrainConfig, recipe: Recipe, world: World) -> None:
        self._config, self._recipe, self._world = config, recipe, world
        self._lr_factor = lr_factor(config, recipe, world)
        graphs = CudaGraphs(world) if config.cuda_graph else None  # before the model
        if recipe.amp == "off":
            # torch's default for convolutions is TF32 (10 bits of mantissa); for matrix products it is float32 already.
            # The newer fp32_precision is not used: once it is set, reading this flag is an error, and torch reads it.
            torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(config.seed)
        on_cpu = world.device.type == "cpu"
        model = fast_cpu(recipe.model()) if on_cpu else recipe.model()
        self.model = world.wrap(model, sync_batchnorm=config.sync_batchnorm)
        for parameter in self.model.parameters():
            parameter.register_hook(_in_order)
        world.seed_rank(config.seed)
        # On CPUs a step takes 9 % less time in channels_last, and 15 % less in bf16.
        self.layout = torch.channels_last if on_cpu or recipe.amp != "off" else torch.contiguous_format
        self.optimizer = recipe.optimizer(self.model.parameters(), recipe.lr)
        self.scaler = world.grad_scaler(torch.float16 if recipe.amp == "fp16" else torch.float32)
        # Of the current update: its batches so far are one or several (`--accumulate`).
        self.is_update_due, self.samples, self.progress = True, 0, 0.0
        # The other tensors that a step reads and writes. A graph always uses the same ones.
        self._mean_batch, self._loss = torch.ones((), device=world.device), torch.zeros((), device=world.device)
        self._lr: torch.Tensor | None = None
        self._graphed_gradients: Callable[..., None] | None = None
        self._apply_gradients: Callable[[], object] = self._step_optimizer
        if graphs is not None:
            self._use(graphs)

    def backward(self, images: torch.Tensor, labels: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Add a batch's part of the gradients of the mean loss over an update's samples, those of all ranks.

        After the update's last batch, `is_update_due` is True and all ranks have the same gradients. Then `samples` is
        the number of samples on this rank, and `progress` the part of the epoch before the update.

        Images are float32 (N, 1, 28, 28), labels int64 (N,), both from the shard. Returns the loss, summed over the
        update's samples on this rank so far: float32, shape ().
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
        self._apply_gradients()

    @torch.inference_mode()
    def output(self, images: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, float32 (N, 10), of images, float32 (N, 1, 28, 28), without communication."""
        return self._output(self.model.module, images)

    def _begin(self, shard: Shard) -> None:
        """Begin an update, with the first of its batches."""
        ranks = self._world.world_size
        before = round(shard.progress * shard.size)
        samples, left = self._recipe.batch_size * ranks * self._config.accumulate, shard.size - before
        if left - samples < ranks:  # the epoch's last update: too few are left for another one
            samples = left
        self.samples, self.progress = 0, shard.progress
        self._mean_batch.fill_(samples / ranks)

    def _gradients(self, images: torch.Tensor, labels: torch.Tensor, *, is_first: bool = True) -> None:
        if is_first:
            self.optimizer.zero_grad()
            self._loss.zero_()
        loss = F.nll_loss(self._output(self.model, images), labels, reduction="sum")
        self.scaler.scale(loss / self._mean_batch).backward()
        self._loss.add_(loss.detach())

    def _step_optimizer(self) -> None:
        """Update. With fp16, divide the gradients by the scale; where they are not finite, only find a new scale."""
        if self.scaler.is_enabled():
            self._world.synchronize()  # the scaler may read from the device whether to update
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _use(self, graphs: CudaGraphs) -> None:
        """Launch each half of the step as one CUDA graph from now on."""
        self._lr = torch.tensor(self._recipe.lr, device=self._world.device)
        for group in self.optimizer.param_groups:
            group["capturable"] = self._world.device.type == "cuda"
        self._graphed_gradients, self._apply_gradients = graphs(self._gradients), graphs(self.optimizer.step)

    def _output(self, model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        dtype = torch.float16 if self._recipe.amp == "fp16" else torch.bfloat16
        with torch.autocast(self._world.device.type, dtype, enabled=self._recipe.amp != "off"):
            output: torch.Tensor = model(images.to(memory_format=self.layout))
        return output


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    """Give a gradient the strides of DDP's buckets. Under channels_last, a convolution's gradient has others."""
    return gradient.reshape(-1).view(gradient.shape)
