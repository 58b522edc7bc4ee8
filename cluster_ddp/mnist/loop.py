"""Train and test the CNN: the loop to copy for a model of your own."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp import (
    Checkpointer,
    FiniteCheck,
    Meter,
    Progress,
    RunDir,
    Shard,
    World,
    distributed,
    load_weights,
)
from cluster_ddp.mnist import benchmark, cuda_graphs, data, idx_files
from cluster_ddp.mnist.config import TrainConfig, TrainResult
from cluster_ddp.mnist.hyperparameters import Recipe, chosen, identity
from cluster_ddp.mnist.train_step import Step

_LONG_RUN_STEPS = 1000  # timing the layouts takes as long as about twenty


def run(config: TrainConfig) -> TrainResult:
    """Train and test, as `mnist.train` describes; or only test (`--eval-only`), or time steps (`--benchmark`)."""
    with distributed(
        cuda=config.cuda,
        deterministic=config.deterministic,
        rendezvous_timeout_s=config.rendezvous_timeout_s,
        collective_timeout_s=config.collective_timeout_s,
        hang_warning_s=config.hang_warning_s,
    ) as world:
        if config.eval_only or config.benchmark:
            recipe = chosen(config, world)
            run_dir = _run_dir(config, recipe, world)
            run_only = benchmark.run if config.benchmark else evaluate
            return run_only(config, recipe, world, run_dir)
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
        world.print(
            f"{world.world_size} ranks, {self.train_shard.size} training samples, run directory {self.run_dir.path}"
        )
        self.step = Step(config, recipe, world)
        self.loss_meter = Meter(world)
        self.finite = FiniteCheck(
            world,
            self.step.model,
            on_nan=config.on_nan,
            last_good=lambda: self.checkpoint.last_good,
            scaler=self.step.scaler,
        )
        self.checkpoint = Checkpointer(
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
            on_nan=config.on_nan,
            trace=config.trace,
            trace_after=cuda_graphs.STEPS_TO_CAPTURE if config.cuda_graph else 2,
            model=self.step.model,
            optimizer=self.step.optimizer,
            step=self.step,
            **({"scaler": self.step.scaler} if self.step.scaler.is_enabled() else {}),
        )
        self._tune()

    def train(self, epoch: int) -> None:
        """Train the rest of an epoch (from 1). Each log line has the mean loss over all ranks since the last line."""
        shard, step = self.train_shard, self.step
        step.model.train()
        start_s, seen_before, waited_s = time.perf_counter(), shard.seen, 0.0
        with Progress(f"epoch {epoch}", total=shard.size, enabled=self.world.is_main) as progress:
            for images, labels in shard:
                loss = step.backward(images, labels, shard)
                if not step.is_update_due:
                    continue
                number = shard.step // self.config.accumulate
                if self.finite.may_update(loss, step=number, epoch=epoch):
                    step.update(epoch - 1 + step.progress)
                    self.loss_meter.add(loss, step.samples)
                if number % self.config.log_interval == 0 or shard.seen == shard.size:
                    self.finite.look()
                    mean_loss = self.loss_meter.mean()
                    now_s = time.perf_counter()
                    speed = {
                        "samples_per_s": round((shard.seen - seen_before) / (now_s - start_s), 1),
                        "waiting_for_data": round((shard.waited_s - waited_s) / (now_s - start_s), 4),
                    }
                    self._log_training(epoch, mean_loss, speed, progress)
                    start_s, seen_before, waited_s = now_s, shard.seen, shard.waited_s
                    self.loss_meter.reset()
                self.checkpoint.step()
                if self.config.dry_run:
                    break

    def test(self, epoch: int) -> None:
        """Log loss and accuracy over the whole test set."""
        values = tested(self.step, self.test_shard, self.world, between=self.checkpoint.stop_if_asked)
        self.run_dir.log("test", {"epoch": epoch, **values})
        self.measured |= {"accuracy": values["accuracy"], "loss": values["loss"]}

    def finish(self) -> TrainResult:
        """Log the end of the training, with the weights' digest. Returns the last figures.

        Raises:
            RuntimeError: the ranks have different weights.
        """
        self.step.share_buffers()
        self.run_dir.log("done", {"weights_sha256": _same_weights(self.world, self.step.model)})
        if self.config.save_model:
            self.run_dir.save("mnist_cnn.pt", self.step.model.module.state_dict())
        return TrainResult(run_dir=self.run_dir.path, **self.measured)

    def _tune(self) -> None:
        """In a long run, or with --tune always, take the memory layout that is the fastest here."""
        steps = self.epochs * len(self.train_shard) - self.checkpoint.steps * self.config.accumulate
        wanted = self.config.tune == "always" or (self.config.tune == "auto" and steps >= _LONG_RUN_STEPS)
        if self.config.deterministic or self.step.is_tuned or not wanted:
            return
        seconds = self.step.tune()
        self.run_dir.log("tune", {"layout": self.step.layout, "seconds": seconds})
        told = ", ".join(f"{layout} {1000 * taken:.1f} ms" for layout, taken in seconds.items())
        self.world.print(f"Memory layout: {self.step.layout} (forward and backward: {told})")

    def _log_training(self, epoch: int, loss: float | None, speed: dict[str, float], progress: Progress) -> None:
        shard = self.train_shard
        values = {
            "epoch": epoch,
            "step": shard.step // self.config.accumulate,
            "samples": shard.seen,
            **({} if loss is None else {"loss": loss}),
            "lr": float(self.step.optimizer.param_groups[0]["lr"]),
            **speed,
        }
        self.run_dir.log("train", values)
        self.measured["samples_per_s"] = speed["samples_per_s"]
        line = f"Train Epoch: {epoch} [{shard.seen}/{shard.size} ({100 * shard.seen / shard.size:.0f}%)]"
        progress.update(shard.seen, f"{line}\tLoss: {'none finite' if loss is None else f'{loss:.6f}'}")


def tested(
    step: Step, shard: Shard, world: World, *, between: Callable[[], object] = lambda: None
) -> dict[str, float | int]:
    """Loss and accuracy over the whole test set. Every sample counts once, whatever the number of ranks. A collective.

    Args:
        step: has the model.
        shard: of the test set.
        world: of the ranks.
        between: called between two batches.
    """
    step.share_buffers()
    step.model.eval()
    loss_sum = correct = torch.zeros((), device=world.device)
    for images, labels in shard:
        output = step.output(images)
        loss_sum = loss_sum + F.nll_loss(output, labels, reduction="sum")
        correct = correct + (output.argmax(dim=1) == labels).sum()
        if shard.seen < shard.size:  # in the last batch of a small set, some ranks have no samples
            between()
    all_loss, all_correct = world.sum(loss_sum, correct)
    loss, accuracy = all_loss / shard.size, all_correct / shard.size
    world.print(
        f"Test set: Average loss: {loss:.4f}, Accuracy: {int(all_correct)}/{shard.size} ({100 * accuracy:.2f}%)"
    )
    return {"loss": loss, "accuracy": accuracy, "correct": int(all_correct), "samples": shard.size}


def evaluate(config: TrainConfig, recipe: Recipe, world: World, run_dir: RunDir) -> TrainResult:
    """Test the weights of a checkpoint, once."""
    _, shard = data.shards(config, recipe.batch_size, world)
    step = Step(config, recipe, world)
    path = load_weights(config.resume, step.model)
    world.print(f"Testing the weights of {path}")
    values = tested(step, shard, world)
    run_dir.log("test", {"weights": str(path), **values})
    return TrainResult(run_dir=run_dir.path, accuracy=values["accuracy"], loss=values["loss"])


def _run_dir(config: TrainConfig, recipe: Recipe, world: World) -> RunDir:
    """The run directory, with the configuration in it. None is made if the data is missing."""
    if config.dataset != "digits":
        idx_files.check(config.data_dir, dataset=config.dataset, check_content=False)
    run_dir = RunDir(config.run_dir, world, name=config.dataset_name)
    if config.eval_only or config.benchmark:
        benchmark.check_is_free(run_dir)
    run_dir.describe(dataclasses.replace(config, **recipe.options(), global_batch_size=None))
    return run_dir


def _same_weights(world: World, model: DistributedDataParallel) -> str:
    """The SHA-256 of the weights, which must be the same on all ranks."""
    digest = hashlib.sha256()
    world.synchronize()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = world.gather(digest.hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different weights: {digests}")
    return digests[0]
