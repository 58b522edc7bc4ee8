"""The training: the loop to copy for a model of your own, the step of a batch, and steps as CUDA graphs.

Kernels of a small model take less time than the CPU needs to launch them. See CUDA Graphs in PyTorch's CUDA semantics
(docs.pytorch.org/docs/stable/notes/cuda.html), which also lists what a captured function must not do.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F

import cluster_ddp
from cluster_ddp import DeviceError, Shard, World
from cluster_ddp.mnist import data
from cluster_ddp.mnist.model import Recipe, chosen, fast_cpu, identity, lr_factor, warm_up
from cluster_ddp.mnist.train_config import TrainConfig, TrainResult

# In its first ten steps DDP times itself, with events that can't be captured.
_WARM_UPS = 11


def run(config: TrainConfig) -> TrainResult:
    """Train and test, as `mnist.train` describes; or only test (`--eval-only`)."""
    with cluster_ddp.distributed(
        cuda=config.cuda,
        deterministic=config.deterministic,
        rendezvous_timeout_s=config.rendezvous_timeout_s,
        collective_timeout_s=config.collective_timeout_s,
        hang_warning_s=config.hang_warning_s,
    ) as world:
        if config.eval_only:
            return evaluate(config, world)
        training = Training(config, world)
        for epoch in training.checkpoint.epochs(training.epochs):
            training.train(epoch + 1)
            training.test(epoch + 1)
        return training.finish()


class Training:
    """One rank's training. The order in which the constructor makes its parts matters."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.measured: dict[str, float] = {}
        recipe = chosen(config, world)
        self.run_dir = _run_dir(config, recipe, world)
        self.epochs = 1 if config.dry_run else recipe.epochs
        self.train_shard, self.test_shard = data.shards(config, recipe.batch_size, world)
        size = self.train_shard.size
        ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        world.print(f"{ranks}, {size} training samples, run directory {self.run_dir.path}")
        self.step = Step(config, recipe, world)
        self.loss_meter = cluster_ddp.Meter(world)
        model, scaler, on_nan = self.step.model, self.step.scaler, config.on_nan
        self.finite = cluster_ddp.FiniteCheck(
            world, model, on_nan=on_nan, scaler=scaler, last_good=lambda: self.checkpoint.last_good
        )
        self.checkpoint = cluster_ddp.Checkpointer(
            world,
            shard=self.train_shard,
            run_dir=self.run_dir,
            every="never" if config.dry_run else config.checkpoint_every,
            keep=config.keep_checkpoints,
            resume=config.resume,
            identity=identity(config, recipe),
            meters={"loss": self.loss_meter},
            stop_signals=config.stop_signals,
            before_save=self.finite.look,
            on_nan=on_nan,
            model=model,
            optimizer=self.step.optimizer,
            **({"scaler": scaler} if scaler.is_enabled() else {}),
        )

    def train(self, epoch: int) -> None:
        """Train the rest of an epoch (from 1). Each log line has the mean loss over all ranks since the last line."""
        shard, step = self.train_shard, self.step
        step.model.train()
        since_log = _Window(shard)
        with cluster_ddp.Progress(f"epoch {epoch}", total=shard.size, enabled=self.world.is_main) as progress:
            for images, labels in shard:
                if self.config.dry_run and shard.step >= self.config.accumulate:
                    break  # here, not after a step: a resume ends the epoch here, too
                loss = step.backward(images, labels, shard)
                if not step.is_update_due:
                    continue
                number = shard.step // self.config.accumulate
                if self.finite.may_update(loss, step=number, epoch=epoch):
                    step.update(epoch - 1 + step.progress)
                    self.loss_meter.add(loss, step.samples)
                if number % self.config.log_interval == 0 or shard.seen == shard.size:
                    self._log(epoch, number, since_log, progress)
                self.checkpoint.step()

    def test(self, epoch: int) -> None:
        """Log loss and accuracy over the whole test set."""
        values = tested(self.step, self.test_shard, self.world, between=self.checkpoint.stop_if_asked)
        self.run_dir.log("test", {"epoch": epoch, **values})
        self.measured |= {"accuracy": values["accuracy"], "loss": values["loss"]}

    def finish(self) -> TrainResult:
        """Log the end of the training, with the weights' digest: the same on all ranks, or a RuntimeError."""
        self.world.share_buffers(self.step.model)
        self.run_dir.log("done", {"weights_sha256": self.world.weights_digest(self.step.model)})
        if self.config.save_model:
            self.run_dir.save("mnist_cnn.pt", self.step.model.module.state_dict())
        return TrainResult(run_dir=self.run_dir.path, **self.measured)

    def _log(self, epoch: int, number: int, since_log: _Window, progress: cluster_ddp.Progress) -> None:
        """Write and show the figures since the last log line, after so many updates."""
        self.finite.look()
        loss = self.loss_meter.mean()
        self.loss_meter.reset()
        seen, size, speed = self.train_shard.seen, self.train_shard.size, since_log.restart()
        known = {} if loss is None else {"loss": loss}
        lr = float(self.step.optimizer.param_groups[0]["lr"])
        self.run_dir.log("train", {"epoch": epoch, "step": number, "samples": seen, **known, "lr": lr, **speed})
        self.measured["samples_per_s"] = speed["samples_per_s"]
        shown = "none finite" if loss is None else f"{loss:.6f}"
        progress.update(seen, f"Train Epoch: {epoch} [{seen}/{size} ({100 * seen / size:.0f}%)]\tLoss: {shown}")


class _Window:
    """The speed since the last log line."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._start_s, self._seen, self._waited_s = time.perf_counter(), shard.seen, 0.0

    def restart(self) -> dict[str, float]:
        """Return samples per second, and the part of the time that was spent waiting for data. Begin anew."""
        now_s, seen, waited_s = time.perf_counter(), self._shard.seen, self._shard.waited_s
        taken_s = now_s - self._start_s
        speed = {
            "samples_per_s": round((seen - self._seen) / taken_s, 1),
            "waiting_for_data": round((waited_s - self._waited_s) / taken_s, 4),
        }
        self._start_s, self._seen, self._waited_s = now_s, seen, waited_s
        return speed


def tested(
    step: Step, shard: Shard, world: World, *, between: Callable[[], object] = lambda: None
) -> dict[str, float | int]:
    """Loss and accuracy over the test set, each sample once. A collective. Calls `between` between two batches."""
    world.share_buffers(step.model)
    step.model.eval()
    loss_sum = correct = torch.zeros((), device=world.device)
    for images, labels in shard:
        output = step.output(images)
        loss_sum = loss_sum + F.nll_loss(output, labels, reduction="sum")
        correct = correct + (output.argmax(dim=1) == labels).sum()
        if shard.seen < shard.size:  # in the last batch of a small set, some ranks have no samples
            between()
    (all_loss, all_correct), size = world.sum(loss_sum, correct), shard.size
    loss, accuracy = all_loss / size, all_correct / size
    world.print(f"Test set: Average loss: {loss:.4f}, Accuracy: {int(all_correct)}/{size} ({100 * accuracy:.2f}%)")
    return {"loss": loss, "accuracy": accuracy, "correct": int(all_correct), "samples": size}


def evaluate(config: TrainConfig, world: World) -> TrainResult:
    """Test the weights of a checkpoint, once."""
    recipe = chosen(config, world)
    run_dir = _run_dir(config, recipe, world)
    _, shard = data.shards(config, recipe.batch_size, world)
    step = Step(config, recipe, world)
    path = cluster_ddp.load_weights(config.resume, step.model)
    world.print(f"Testing the weights of {path}")
    values = tested(step, shard, world)
    run_dir.log("test", {"weights": str(path), **values})
    return TrainResult(run_dir=run_dir.path, accuracy=values["accuracy"], loss=values["loss"])


def _run_dir(config: TrainConfig, recipe: Recipe, world: World) -> cluster_ddp.RunDir:
    """The run directory, with the configuration in it. None is made if the data is missing."""
    if config.dataset != "digits":
        data.check(config.data_dir, dataset=config.dataset, check_content=False)
    run_dir = cluster_ddp.RunDir(config.run_dir, world, name=config.dataset_name)
    if config.eval_only and (run_dir.path / "checkpoints").is_dir():
        found = "it is a training's, whose records would be moved."
        asked, hint = f"Writing to the run directory {run_dir.path}:", "give another one: --run-dir PATH"
        raise cluster_ddp.RunDirError(asked, found, hint)
    run_dir.describe(dataclasses.replace(config, **recipe.options(), global_batch_size=None))
    return run_dir


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


class CudaGraphs:
    """Makes functions of a training step into CUDA graphs. Make it before the model.

        graphs = CudaGraphs(world)
        model = world.wrap(Model())
        backward = graphs(forward_and_backward)  # a function of images and labels
        for images, labels in shard:
            backward(images, labels, full_batch=shard.is_full_batch)

    All further work of this thread is put on a stream that can be captured. The graphs are reset before the ranks leave
    the world: NCCL can't destroy a communicator while a graph that uses it is alive.

    Args:
        world: of the ranks.

    Raises:
        DeviceError: this rank computes on no GPU.
    """

    def __init__(self, world: World) -> None:
        device = world.device
        if device.type != "cuda":
            found, hint = f"this rank computes on {device}.", "leave them out (of cluster-ddp train: --cuda-graph)"
            raise DeviceError("Capturing steps in CUDA graphs:", found, hint)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # earlier work may still be running
        torch.cuda.set_stream(stream)
        world.watch_stream(stream)
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        world.before_leaving(self.reset)

    def __call__(self, function: Callable[..., object]) -> GraphedFunction:
        """Return a function that runs this one: at first as it is, later as a CUDA graph.

        Args:
            function: of tensors. Its results must be in tensors that stay where they are in memory. It must not wait
                for the device.
        """
        return GraphedFunction(function, self.captured)

    def captured(self, function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Capture what the function launches, without running it. Returns what replays the graph."""
        graph = torch.cuda.CUDAGraph()
        self._alive.add(graph)
        # "thread_local": the thread that pins a loader's batches calls CUDA while this one captures.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            function(*inputs)
        return graph.replay

    def reset(self) -> None:
        """Reset all graphs: they can't be replayed any more. The device must have finished its work.

        ncclCommDestroy and ncclCommAbort wait, without a limit, for the end of every graph that has captured the
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        for graph in list(self._alive):
            graph.reset()
        self._alive.clear()


class GraphedFunction:
    """A function that is captured and replayed; `CudaGraphs` makes it.

    The first 11 calls run the function itself, since libraries initialise themselves in them. The first full batch
    after them is captured. It and every later full batch are replayed. Random numbers are the same as without a graph.
    Python's numbers are frozen at the capture: what changes must be a tensor.
    """

    def __init__(self, function: Callable[..., object], captured: Callable[..., Callable[[], None]]) -> None:
        self._function, self._captured, self._warm_ups = function, captured, _WARM_UPS
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, *inputs: torch.Tensor, full_batch: bool = True) -> None:
        """Run it on the current stream. What it returns is dropped.

        Args:
            inputs: tensors of the same shapes in every full batch.
            full_batch: whether every rank has a batch of the full size (`Shard.is_full_batch`). It must be the same on
                all ranks: NCCL does not support a collective that some ranks replay and others launch.
        """
        if self._warm_ups > 0 or not full_batch:
            self._warm_ups -= 1
            self._function(*inputs)
            return
        if self._replay is None:
            self._inputs = tuple(tensor.clone() for tensor in inputs)
            self._replay = self._captured(self._function, self._inputs)
        for mine, given in zip(self._inputs, inputs):
            assert mine.shape == given.shape, "full batches of different sizes"
            mine.copy_(given)
        self._replay()
