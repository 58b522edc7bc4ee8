"""The training that `make chaos` disturbs: small, real, and careful to notice when it was not continued exactly.

It uses what any user's script would. Dropout makes the random numbers matter, four ranks the order in which gradients
are added up, and a ledger counts how often every sample was trained on. Pauses stretch it, so that faults find it at
work at little cost in CPU time.

    python training.py EPOCHS KIND      of KINDS: the strategy of the model, and what else is special

Kinds with "-stream" have data without an index; with "-reader", data with a state in two workers of each rank; with
"-masters", bfloat16 weights and an optimizer that keeps float32 ones; with "-static", a static graph with
several buckets.
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
from torch.utils.data import IterableDataset, get_worker_info

import cluster_ddp
from cluster_ddp.mnist import data
from cluster_ddp.runtime.collectives import Meter
from cluster_ddp.runtime.data.device_dataset import ResidentSet
from cluster_ddp.runtime.data.shard import Shard
from cluster_ddp.runtime.run_dir import background_writer

KINDS = ("fsdp", "ddp", "hsdp-stream", "ddp-reader", "fsdp-masters", "ddp-static")
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

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=5, stride=3)
        self.hidden, self.out = nn.Linear(8 * 8 * 8, width), nn.Linear(width, 10)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, 1, 28, 28), float32, to class scores (N, 10), float32."""
        features = F.relu(self.norm(self.conv(images.to(self.conv.weight.dtype)))).flatten(1)
        scores: torch.Tensor = self.out(F.dropout(F.relu(self.hidden(features)), 0.3, self.training))
        return scores.float()


class MasterWeights(torch.optim.Optimizer):
    """Momentum SGD of bfloat16 parameters: its state has float32 weights and moments, and a count in int64."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the float32 weights, and round them to the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["weights"] = parameter.float()
                    state["moments"] = torch.zeros_like(state["weights"])
                    state["updates"] = torch.zeros((), dtype=torch.int64)
                state["moments"].mul_(0.9).add_(parameter.grad.float())
                state["weights"].add_(state["moments"], alpha=-group["lr"])
                state["updates"] += 1
                parameter.copy_(state["weights"])


class Numbers(IterableDataset[torch.Tensor]):
    """The numbers below a size, in another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randperm(self.size)


class Reader(Numbers):
    """Each worker of each rank has a share of the numbers, a buffer that it shuffles, and a state."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        super().__init__(size)
        self.rank, self.world_size = rank, world_size
        self.epoch = self.read = 0
        self.buffer: list[int] = []
        self.is_loaded = False

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place in this worker's share."""
        return {"read": self.read, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass begins at this place."""
        self.read, self.buffer, self.is_loaded = state["read"], list(state["buffer"]), True

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.is_loaded:
            self.read, self.buffer = 0, []
        self.is_loaded = False
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        share = order[self.rank * workers + number :: self.world_size * workers]
        while self.read < len(share) or self.buffer:
            while self.read < len(share) and len(self.buffer) < 5:
                self.buffer.append(share[self.read])
                self.read += 1
            yield torch.tensor(self.buffer.pop(int(torch.randint(len(self.buffer), ()))))


def main(epochs: int, kind: str) -> None:
    """Train, test after every epoch, and in the end say whether the books are right."""
    strategy, _, special = kind.partition("-")
    with cluster_ddp.distributed(cuda=False, rendezvous_timeout_s=60, collective_timeout_s=120) as world:
        shard, test_shard, size = _load(world, special)
        torch.manual_seed(SEED)
        model, optimizer = _model(world, strategy, special)
        world.seed_rank(SEED)
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
                if checkpoint.steps % LOG_EVERY == 0:
                    checkpoint.run_dir.log("after_step", {"steps": checkpoint.steps})
            correct = world.sum(_test(model, test_shard, checkpoint))
            checkpoint.run_dir.log("test", {"epoch": epoch, "correct": correct, "each_once": ledger.all_are(epoch + 1)})
            scheduler.step()
        digest = world.weights_digest(model)  # raises if the ranks differ
        drawn = float(torch.rand(()))  # a last start that has nothing to train draws it, too
        each_once = ledger.all_are(epochs)
        checkpoint.run_dir.log("done", {"weights_sha256": digest, "each_once": each_once, "drawn": drawn})


def _model(world: cluster_ddp.World, strategy: str, special: str) -> tuple[Any, torch.optim.Optimizer]:
    net = Net(width=1024 if special == "static" else 48)  # static: several buckets
    if special == "masters":
        net.bfloat16()
    graph = {"static_graph": True} if special == "static" else {}
    model = world.wrap(net, strategy=strategy, blocks=nn.Linear, **graph)  # type: ignore[call-overload]
    if special == "masters":
        return model, MasterWeights(model.parameters(), lr=0.003)
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def _load(world: cluster_ddp.World, special: str) -> tuple[Any, Shard, int]:
    """This rank's batches of numbers, images, labels, to train on and to test; and how many there are to train on."""
    train_set, test_set = (_numbered(images) for images in data.load("digits", Path()))
    test_shard = world.shard(test_set, batch_size=BATCH_SIZE)
    size = len(train_set)
    if special not in ("stream", "reader"):
        return world.shard(train_set, batch_size=BATCH_SIZE, shuffle_seed=SEED), test_shard, size
    way: dict[str, Any] = {"collate_fn": lambda numbers: train_set.batch(torch.stack(numbers))}
    if special == "reader":
        iterable: Numbers = Reader(size, world.rank, world.world_size)
        way |= {"split": "own", "num_workers": 2}
    else:
        iterable = Numbers(size)
    return world.stream(iterable, batch_size=BATCH_SIZE, seed=SEED, **way), test_shard, size


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
