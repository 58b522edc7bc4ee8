"""One rank of a sharded training: `python tests/gpu/scripts/sharded.py TASK.json`. Trains until USR1, or resumes.

The task holds rehearse, shared_gpu, strategy, offload, and the run directory. Where that has no checkpoint, the same
training runs undisturbed and without a Checkpointer first, and both under FSDP2 and DDP in float32.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patches
import torch
from torch import nn

import cluster_ddp

EPOCHS, STOP_AFTER = 20, 5  # of 40 updates; the ranks agree on a stop some ten later
_WIDTH = 67  # shards of different sizes


class Block(nn.Module):
    """The layer that the model repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.drop(self.linear(self.norm(x)).relu())
        return y


class Training:
    """Dropout, AdamW, two batches an update, gradients clipped."""

    def __init__(self, world: cluster_ddp.World, **how: Any) -> None:
        self.world = world
        torch.manual_seed(world.rank)  # all get rank 0's weights
        with world.empty_init():
            model = nn.Sequential(nn.Linear(5, _WIDTH), *(Block() for _ in range(3)), nn.Linear(_WIDTH, 1))
        self.model = world.wrap(model, **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        x = torch.randn(16 * world.world_size, 5, generator=torch.Generator().manual_seed(1))
        self.shard = world.shard(
            torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle_seed=1
        )
        world.seed_rank(3)
        self.norms: list[float] = []

    def updates(self) -> Iterator[None]:
        """One epoch, up to each update."""
        for x, y in self.shard:
            with self.world.accumulate(self.model, self.shard, every=2) as is_last:
                (nn.functional.mse_loss(self.model(x).float(), y) / 2).backward()
            if is_last:
                self.norms.append(self.world.clip_grad_norm(self.model, 0.5))
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield

    def undisturbed(self, epochs: int) -> str:
        """Train without a Checkpointer. Returns the digest of the weights."""
        for epoch in range(epochs):
            self.shard.set_epoch(epoch)
            for _ in self.updates():
                pass
        return self.world.weights_digest(self.model)


def main() -> None:
    """Train; rank 0 writes result.json into the run directory."""
    task = json.loads(Path(sys.argv[1]).read_text())
    patches.PATCHES["shared_gpu"](task["shared_gpu"], task)
    run_dir = Path(task["run_dir"])
    with cluster_ddp.distributed(cuda=not task["rehearse"], deterministic=True) as world:
        how = {"strategy": task["strategy"], "blocks": Block}
        result: dict[str, Any] = {}
        if not (run_dir / "checkpoints").exists():
            result["norms"] = [_norms(world), _norms(world, **how)]
            result["whole"] = Training(world, **_mixed(task, how)).undisturbed(EPOCHS)
        _resumable(world, run_dir, result, stops=bool(result), how=_mixed(task, how))


def _norms(world: cluster_ddp.World, **how: Any) -> list[float]:
    training = Training(world, **how)
    training.undisturbed(3)
    return training.norms


def _mixed(task: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=not task["rehearse"])} if task["offload"] else {}
    return {**how, **offload, "mixed": torch.bfloat16}


def _resumable(world: cluster_ddp.World, run_dir: Path, result: dict[str, Any], *, stops: bool, how: Any) -> None:
    training = Training(world, **how)
    parts = {"model": training.model, "optimizer": training.optimizer}
    checkpoint = cluster_ddp.Checkpointer(world, shard=training.shard, run_dir=run_dir, every="10steps", **parts)
    result["resumed_at"] = checkpoint.steps
    _write(world, run_dir, result)
    for _ in checkpoint.epochs(EPOCHS):
        for _ in training.updates():
            if stops and checkpoint.steps + 1 == STOP_AFTER and world.rank == world.world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            checkpoint.step()
    result["is_pinned"] = checkpoint._state.host_copy.local_pieces.content.is_pinned()
    _write(world, run_dir, {**result, "resumed": world.weights_digest(training.model)})


def _write(world: cluster_ddp.World, run_dir: Path, result: dict[str, Any]) -> None:
    if world.is_main:
        (run_dir / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
