"""Train and test the CNN: the loop to copy for a model of your own."""

from __future__ import annotations

import dataclasses
import hashlib
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp import Checkpointer, FiniteCheck, Meter, Progress, RunDir, Shard, World, distributed
from cluster_ddp.mnist import data
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.mnist.recipes import chosen
from cluster_ddp.mnist.result import TrainResult
from cluster_ddp.mnist.step import Step

_LONG_RUN_STEPS = 1000  # timing the layouts takes as long as about twenty


def run(config: TrainConfig) -> TrainResult:
    """Train and test, as `mnist.train` describes."""
    with distributed(
        cuda=config.cuda,
        deterministic=config.deterministic,
        rendezvous_timeout_s=config.rendezvous_timeout_s,
        collective_timeout_s=config.collective_timeout_s,
    ) as world:
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
        self.run_dir = RunDir(config.run_dir, world, name=config.dataset)
        recipe = chosen(config)
        self.run_dir.describe(dataclasses.replace(config, **recipe.options()))
        self.epochs = 1 if config.dry_run else recipe.epochs
        self.train_shard, self.test_shard = _shards(config, recipe.batch_size, world)
        world.print(
            f"{world.world_size} ranks, {self.train_shard.size} training samples, run directory {self.run_dir.path}"
        )
        self.step = Step(config, recipe, world)
        self.loss_meter = Meter(world)
        self.finite = FiniteCheck(
            world, self.step.model, on_nan=config.on_nan, last_good=lambda: self.checkpoint.last_good
        )
        self.checkpoint = Checkpointer(
            world,
            shard=self.train_shard,
            run_dir=self.run_dir,
            every="never" if config.dry_run else config.checkpoint_every,
            keep=config.keep_checkpoints,
            resume=config.resume,
            identity={
                "dataset": config.dataset,
                "recipe": config.recipe,
                "lr": recipe.lr,
                "gamma": config.gamma,
                "amp": recipe.amp,
                **({"cuda_graph": "yes"} if config.cuda_graph else {}),
            },
            meters={"loss": self.loss_meter},
            stop_signals=config.stop_signals,
            before_save=self.finite.look,
            model=self.step.model,
            optimizer=self.step.optimizer,
            step=self.step,
        )
        self._tune()

    def train(self, epoch: int) -> None:
        """Train the rest of an epoch (from 1). Each log line has the mean loss over all ranks since the last line."""
        shard = self.train_shard
        self.step.model.train()
        start_s, seen_before = time.perf_counter(), shard.seen
        with Progress(f"epoch {epoch}", total=shard.size, enabled=self.world.is_main) as progress:
            for images, labels in shard:
                loss = self.step.backward(images, labels, shard)
                if self.finite.may_update(loss, step=shard.step, epoch=epoch):
                    self.step.update(epoch - 1 + shard.progress)
                    self.loss_meter.add(loss, len(labels))
                if shard.step % self.config.log_interval == 0 or shard.seen == shard.size:
                    self.finite.look()
                    mean_loss = self.loss_meter.mean()
                    now_s = time.perf_counter()
                    self._log_training(epoch, mean_loss, (shard.seen - seen_before) / (now_s - start_s), progress)
                    start_s, seen_before = now_s, shard.seen
                    self.loss_meter.reset()
                self.checkpoint.step()
                if self.config.dry_run:
                    break

    def test(self, epoch: int) -> None:
        """Log loss and accuracy over the whole test set. Every sample counts once, whatever the number of ranks."""
        self.step.model.eval()
        shard, device = self.test_shard, self.world.device
        loss_sum = correct = torch.zeros((), device=device)
        for images, labels in shard:
            output = self.step.output(images)
            loss_sum = loss_sum + F.nll_loss(output, labels, reduction="sum")
            correct = correct + (output.argmax(dim=1) == labels).sum()
            if shard.seen < shard.size:  # in the last batch of a small set, some ranks have no samples
                self.checkpoint.stop_if_asked()
        all_loss, all_correct = self.world.sum(loss_sum, correct)
        values = {
            "epoch": epoch,
            "loss": all_loss / shard.size,
            "accuracy": all_correct / shard.size,
            "correct": int(all_correct),
            "samples": shard.size,
        }
        self.run_dir.log("test", values)
        self.measured |= {"accuracy": values["accuracy"], "loss": values["loss"]}
        self.world.print(
            f"Test set: Average loss: {values['loss']:.4f}, "
            f"Accuracy: {values['correct']}/{shard.size} ({100 * values['accuracy']:.2f}%)"
        )

    def finish(self) -> TrainResult:
        """Log the end of the training, with the weights' digest. Returns the last figures.

        Raises:
            RuntimeError: the ranks have different weights.
        """
        self.run_dir.log("done", {"weights_sha256": _same_weights(self.world, self.step.model)})
        if self.config.save_model:
            self.run_dir.save("mnist_cnn.pt", self.step.model.module.state_dict())
        return TrainResult(run_dir=self.run_dir.path, **self.measured)

    def _tune(self) -> None:
        """In a long run, or with --tune always, take the memory layout that is the fastest here."""
        steps = self.epochs * len(self.train_shard) - self.checkpoint.steps
        wanted = self.config.tune == "always" or (self.config.tune == "auto" and steps >= _LONG_RUN_STEPS)
        if self.config.deterministic or self.step.is_tuned or not wanted:
            return
        seconds = self.step.tune()
        self.run_dir.log("tune", {"layout": self.step.layout, "seconds": seconds})
        told = ", ".join(f"{layout} {1000 * taken:.1f} ms" for layout, taken in seconds.items())
        self.world.print(f"Memory layout: {self.step.layout} (forward and backward: {told})")

    def _log_training(self, epoch: int, loss: float | None, samples_per_s: float, progress: Progress) -> None:
        shard = self.train_shard
        values = {
            "epoch": epoch,
            "step": shard.step,
            "samples": shard.seen,
            **({} if loss is None else {"loss": loss}),
            "lr": float(self.step.optimizer.param_groups[0]["lr"]),
            "samples_per_s": round(samples_per_s, 1),
        }
        self.run_dir.log("train", values)
        self.measured["samples_per_s"] = values["samples_per_s"]
        line = f"Train Epoch: {epoch} [{shard.seen}/{shard.size} ({100 * shard.seen / shard.size:.0f}%)]"
        progress.update(shard.seen, f"{line}\tLoss: {'none finite' if loss is None else f'{loss:.6f}'}")


def _shards(config: TrainConfig, batch_size: int, world: World) -> tuple[Shard, Shard]:
    # One rank of each node reads all bytes for the digests. All ranks check that the files are there, and their sizes.
    check_content = world.topology.local_rank == 0
    train_set, test_set = data.load(config.dataset, config.data_dir, check_content=check_content)
    return (
        world.shard(train_set, batch_size=batch_size, shuffle_seed=config.seed, resident_share=config.resident_share),
        world.shard(test_set, batch_size=config.test_batch_size, resident_share=config.resident_share),
    )


def _same_weights(world: World, model: DistributedDataParallel) -> str:
    """The SHA-256 of the weights, which must be the same on all ranks."""
    digest = hashlib.sha256()
    world.synchronize()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests = world.gather(digest.hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different weights: {digests}")
    return digests[0]
