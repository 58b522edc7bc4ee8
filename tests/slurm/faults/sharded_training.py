"""A model that is sharded over the ranks, trained on a stream at a walking pace, and with faults of its own.

PACE_S     seconds that each step takes longer
FAULTS     JSON: [{"rank": 1, "writes": "step-00000010.pieces/.rank-1-"}, {"rank": 0, "step": 30, "start": 1}, …]: in
           the job's first start, or the one in "start", this rank gets SIGKILL while such a file is written, and before
           it has its name; or it does nothing more after that step
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import cluster_ddp

PACE_S = float(os.environ.get("PACE_S", "0"))
START, RANK = int(os.environ.get("CLUSTER_DDP_START", "0")), int(os.environ["SLURM_PROCID"])
FAULTS = [
    one for one in json.loads(os.environ.get("FAULTS", "[]")) if (one["rank"], one.get("start", 0)) == (RANK, START)
]
EPOCHS, SAMPLES = 2, 320

fsync = os.fsync


def fatal_fsync(descriptor: int) -> None:
    written = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    if any(one.get("writes", "\0") in written for one in FAULTS):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)


class Samples(IterableDataset[torch.Tensor]):
    """Numbered samples with noise. The state is the place."""

    place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.place, SAMPLES):
            self.place = number + 1
            yield torch.cat([torch.randn(5), torch.tensor([float(number)])])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Block(nn.Module):
    """Thirteen rows, so that the ranks' pieces differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(13, 27), nn.Linear(27, 13), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(self.wide(x).relu()))  # type: ignore[no-any-return]


def main() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 13), Block(), Block(), nn.Linear(13, 1))
        model = world.wrap(net, strategy="fsdp", blocks=Block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        stream = world.stream(Samples(), batch_size=16 // world.world_size)
        world.seed_rank(3)
        checkpoint = cluster_ddp.Checkpointer(world, shard=stream, model=model, optimizer=optimizer, every="5steps")
        for epoch in checkpoint.epochs(EPOCHS):
            for batch in stream:
                time.sleep(
                    PACE_S + 600 * any(one.get("step") == checkpoint.steps for one in FAULTS)
                )  # its save is begun
                optimizer.zero_grad()
                loss = (model(batch[:, :5]).squeeze(1) - batch[:, :5].sum(1)).square().mean()
                loss.backward()
                world.clip_grad_norm(model, 1.0)
                optimizer.step()
                numbers = world.sum(*batch[:, 5:].sum(0).tolist(), loss.item())
                world.log("train", epoch=epoch, step=checkpoint.steps + 1, numbers=numbers[0], loss=numbers[1])
                checkpoint.step()
        world.log("done", weights=world.weights_digest(model))


os.fsync = fatal_fsync  # type: ignore[assignment]
main()
