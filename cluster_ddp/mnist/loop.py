"""Train and test the CNN: the loop to copy for a model of your own."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from cluster_ddp.mnist import data
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.mnist.model import Net
from cluster_ddp.runtime.metrics import RunDir
from cluster_ddp.runtime.progress import Progress
from cluster_ddp.runtime.shard import Shard
from cluster_ddp.runtime.world import World, distributed


def run(config: TrainConfig) -> None:
    """Join the world, train for all epochs, test after each.

    Raises:
        ClusterDDPError: the ranks did not meet, the data is missing, or the run folder can't be written.
    """
    with distributed(cuda=config.cuda, rendezvous_timeout_s=config.rendezvous_timeout_s) as world:
        run_dir = RunDir(config.run_dir or _default_run_dir(config, world), world)
        run_dir.describe(config)
        train_shard, test_shard = _shards(config, world)
        world.print(f"{world.world_size} ranks, {train_shard.size} training samples, run folder {run_dir.path}")
        torch.manual_seed(config.seed)
        model = world.wrap(Net())
        world.seed_rank(config.seed)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=config.lr)
        scheduler = StepLR(optimizer, step_size=1, gamma=config.gamma)
        for epoch in range(1, (1 if config.dry_run else config.epochs) + 1):
            train(config, world, model, train_shard, optimizer, epoch, run_dir)
            test(world, model, test_shard, epoch, run_dir)
            scheduler.step()
        run_dir.log("done", {"weights_sha256": _same_weights(world, model)})
        if config.save_model:
            run_dir.save("mnist_cnn.pt", model.module.state_dict())


def train(
    config: TrainConfig,
    world: World,
    model: DistributedDataParallel,
    shard: Shard,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    run_dir: RunDir,
) -> None:
    """One epoch of training; logs the mean loss of all ranks since the last line."""
    model.train()
    shard.set_epoch(epoch)
    start_s, seen_before, samples = time.perf_counter(), 0, 0
    loss_sum = torch.zeros((), device=world.device)
    with Progress(f"epoch {epoch}", total=shard.size, enabled=world.is_main) as progress:
        for step, (images, labels) in enumerate(shard):
            images, labels = images.to(world.device), labels.to(world.device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels, reduction="sum")
            (loss / shard.mean_batch(step)).backward()
            optimizer.step()
            loss_sum, samples = loss_sum + loss.detach(), samples + len(labels)
            if step % config.log_interval == 0 or step == len(shard) - 1:
                mean_loss = world.mean(loss_sum, samples)  # waits for the device
                now_s, seen = time.perf_counter(), shard.samples_seen(step)
                values = {
                    "epoch": epoch,
                    "step": step,
                    "samples": seen,
                    "loss": mean_loss,
                    "lr": optimizer.param_groups[0]["lr"],
                    "samples_per_s": round((seen - seen_before) / (now_s - start_s), 1),
                }
                run_dir.log("train", values)
                line = f"Train Epoch: {epoch} [{seen}/{shard.size} ({100 * seen / shard.size:.0f}%)]"
                progress.update(seen, f"{line}\tLoss: {mean_loss:.6f}")
                start_s, seen_before, samples = now_s, seen, 0
                loss_sum = torch.zeros_like(loss_sum)
            if config.dry_run:
                break


@torch.no_grad()
def test(world: World, model: DistributedDataParallel, shard: Shard, epoch: int, run_dir: RunDir) -> None:
    """Loss and accuracy over the whole test set, every sample counted once, whatever the number of ranks."""
    model.eval()
    loss_sum = correct = torch.zeros((), device=world.device)
    for images, labels in shard:
        # The bare module: ranks may have different numbers of batches here, and DDP's forward may communicate.
        images, labels = images.to(world.device), labels.to(world.device)
        output = model.module(images)
        loss_sum = loss_sum + F.nll_loss(output, labels, reduction="sum")
        correct = correct + (output.argmax(dim=1) == labels).sum()
    all_loss, all_correct = world.sum(loss_sum, correct)
    values = {
        "epoch": epoch,
        "loss": all_loss / shard.size,
        "accuracy": all_correct / shard.size,
        "correct": int(all_correct),
        "samples": shard.size,
    }
    run_dir.log("test", values)
    world.print(
        f"Test set: Average loss: {values['loss']:.4f}, "
        f"Accuracy: {values['correct']}/{shard.size} ({100 * values['accuracy']:.2f}%)"
    )


def _shards(config: TrainConfig, world: World) -> tuple[Shard, Shard]:
    # One rank of each node reads all bytes for the digests; that the files are there and whole, all look.
    check_content = world.topology.local_rank == 0
    train_set, test_set = data.load(config.dataset, config.data_dir, check_content=check_content)
    return (
        world.shard(
            train_set,
            batch_size=config.batch_size,
            shuffle_seed=config.seed,
            collate_fn=data.as_batch,
        ),
        world.shard(test_set, batch_size=config.test_batch_size, collate_fn=data.as_batch),
    )


def _default_run_dir(config: TrainConfig, world: World) -> Path:
    if submitted := os.environ.get("CLUSTER_DDP_RUN_DIR"):
        return Path(submitted)
    label = world.topology.job_label or time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{config.dataset}-{label}"


def _same_weights(world: World, model: DistributedDataParallel) -> str:
    """The SHA-256 of the weights, which must be the same on all ranks."""
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests = world.gather(digest.hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different weights: {digests}")
    return digests[0]
