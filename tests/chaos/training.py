"""The training that `make chaos` disturbs: small, real, and careful to notice when it was not continued exactly.

It uses what any user's script would. Dropout makes the random numbers matter, four ranks the order in which gradients
are added up, and a ledger counts how often every sample was trained on. Pauses stretch it, so that faults find it at
work at little cost in CPU time.

    python training.py EPOCHS KIND      of KINDS: the strategy of the model, and for "-stream" data without an index
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import cluster_ddp
from cluster_ddp.mnist import data
from cluster_ddp.runtime.collectives import Meter
from cluster_ddp.runtime.data.device_dataset import ResidentSet
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.run_dir import background_writer

KINDS = ("fsdp", "ddp", "hsdp-stream")
BATCH_SIZE = 16
SEED = 7
LOG_EVERY = 3  # not what checkpoints are saved at: the meter's half-full sums must survive, too
CHECKPOINT_EVERY = "5steps"
# A disk that is full in the end stays so; a save with slow fsyncs takes up to 10 s.
background_writer.PATIENCE_S = 15.0
SLOW_DISK = "slow-disk"
"""A file in the run directory with the seconds that every fsync takes while it is there."""

if TYPE_CHECKING:
    from _typeshed import HasFileno  # what type checkers call it; there is no such module when it runs


class Ledger:
    """How often this rank has trained on each sample."""

    def __init__(self, world: cluster_ddp.World, size: int) -> None:
        self.world = world
        self.counts = torch.zeros(size, dtype=torch.int32)

    def note(self, numbers: torch.Tensor) -> None:
        """A batch was trained on."""
        self.counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32))

    def all_are(self, times: int) -> bool:
        """Whether all ranks together have trained on each sample so many times. A collective."""
        return bool((torch.stack(self.world.gather(self.counts)).sum(dim=0) == times).all())

    def state_dict(self) -> dict[str, Any]:
        """This rank's counts."""
        return {"counts": self.counts}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from this rank's counts, or from those of several."""
        self.counts = sum((state["counts"] for state in states), torch.zeros_like(self.counts))


class Net(nn.Module):
    """Parameters of several sizes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=5, stride=3)
        self.hidden, self.out = nn.Linear(8 * 8 * 8, 48), nn.Linear(48, 10)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, 1, 28, 28) to class scores (N, 10)."""
        features = F.relu(self.norm(self.conv(images))).flatten(1)
        scores: torch.Tensor = self.out(F.dropout(F.relu(self.hidden(features)), 0.3, self.training))
        return scores


class Numbers(IterableDataset[torch.Tensor]):
    """The numbers below a size, in another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randperm(self.size)


def main(epochs: int, kind: str) -> None:
    """Train, test after every epoch, and in the end say whether the books are right."""
    strategy, _, source = kind.partition("-")
    with cluster_ddp.distributed(cuda=False, rendezvous_timeout_s=60, collective_timeout_s=120) as world:
        shard, test_shard, size = _load(world, source)
        torch.manual_seed(SEED)
        model: Any = world.wrap(Net(), strategy=strategy, blocks=nn.Linear)  # type: ignore[call-overload]
        world.seed_rank(SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95)
        loss_meter, ledger = Meter(world), Ledger(world, size)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        meters: dict[str, Any] = {"loss": loss_meter, "ledger": ledger}
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every=CHECKPOINT_EVERY, meters=meters, **parts)
        _slow_down_disk(checkpoint.run_dir.path / SLOW_DISK)
        for epoch in checkpoint.epochs(epochs):
            model.train()
            for numbers, images, labels in shard:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels, reduction="sum")
                (loss / shard.mean_batch).backward()
                optimizer.step()
                ledger.note(numbers)
                loss_meter.add(loss, len(labels))
                if shard.step % LOG_EVERY == 0 or shard.is_at_end:
                    checkpoint.run_dir.log("train", {"epoch": epoch, "step": shard.step, "loss": loss_meter.mean()})
                    loss_meter.reset()
                time.sleep(_pause_s(shard.step, world.rank))
                checkpoint.step()
            correct = world.sum(_test(model, test_shard, checkpoint))
            checkpoint.run_dir.log("test", {"epoch": epoch, "correct": correct, "each_once": ledger.all_are(epoch + 1)})
            scheduler.step()
        digest = world.weights_digest(model)  # raises if the ranks differ
        checkpoint.run_dir.log("done", {"weights_sha256": digest, "each_once": ledger.all_are(epochs)})


def _load(world: cluster_ddp.World, source: str) -> tuple[Any, Shard, int]:
    """This rank's batches of numbers, images, labels, to train on and to test; and how many there are to train on."""
    train_set, test_set = (_numbered(images) for images in data.load("digits", Path()))
    test_shard = world.shard(test_set, batch_size=BATCH_SIZE)
    if source != "stream":
        return world.shard(train_set, batch_size=BATCH_SIZE, shuffle_seed=SEED), test_shard, len(train_set)
    stream = world.stream(
        Numbers(len(train_set)),
        batch_size=BATCH_SIZE,
        seed=SEED,
        collate_fn=lambda numbers: train_set.batch(torch.stack(numbers)),
    )
    return stream, test_shard, len(train_set)


@torch.no_grad()
def _test(model: nn.Module, shard: Shard, checkpoint: cluster_ddp.Checkpointer) -> int:
    """This rank's correct answers."""
    model.eval()
    correct = 0
    for _, images, labels in shard:
        correct += int((model(images).argmax(dim=1) == labels).sum())
        time.sleep(0.02)
        if shard.seen < shard.size:
            checkpoint.stop_if_asked()
    return correct


def _numbered(images: ResidentSet) -> ResidentSet:
    """An image set that tells each sample's number, too: batches of numbers, images, labels."""
    numbers = torch.arange(len(images))
    return ResidentSet(numbers, *images.tensors, transform=lambda numbers, *batch: (numbers, *images.transform(*batch)))


def _pause_s(step: int, rank: int) -> float:
    """Mostly short, and now and then, for one rank at a time, longer."""
    return 0.15 if step % 7 == rank else 0.05


def _slow_down_disk(control: Path) -> None:
    """From now on os.fsync is as slow as the control file says."""
    fsync = os.fsync

    def patient(fd: int | HasFileno) -> None:
        if control.exists():
            time.sleep(float(control.read_text() or 0))
        fsync(fd)

    os.fsync = patient


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
