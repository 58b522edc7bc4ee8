"""Train and test the CNN: the loop to copy for a model of your own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import cluster_ddp
from cluster_ddp.mnist import data, idx_files
from cluster_ddp.mnist.recipes import Recipe, chosen, identity
from cluster_ddp.mnist.step import Step
from cluster_ddp.train_options import TrainConfig, TrainResult


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

    def __init__(self, config: TrainConfig, world: cluster_ddp.World) -> None:
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

    def __init__(self, shard: cluster_ddp.Shard) -> None:
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
    step: Step, shard: cluster_ddp.Shard, world: cluster_ddp.World, *, between: Callable[[], object] = lambda: None
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


def evaluate(config: TrainConfig, world: cluster_ddp.World) -> TrainResult:
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


def _run_dir(config: TrainConfig, recipe: Recipe, world: cluster_ddp.World) -> cluster_ddp.RunDir:
    """The run directory, with the configuration in it. None is made if the data is missing."""
    if config.dataset != "digits":
        idx_files.check(config.data_dir, dataset=config.dataset, check_content=False)
    run_dir = cluster_ddp.RunDir(config.run_dir, world, name=config.dataset_name)
    if config.eval_only and (run_dir.path / "checkpoints").is_dir():
        found = "it is a training's, whose records would be moved."
        asked, hint = f"Writing to the run directory {run_dir.path}:", "give another one: --run-dir PATH"
        raise cluster_ddp.RunDirError(asked, found, hint)
    run_dir.describe(dataclasses.replace(config, **recipe.options(), global_batch_size=None))
    return run_dir
