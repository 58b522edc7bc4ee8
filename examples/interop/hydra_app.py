"""A Hydra application in a job. cluster_ddp stops and resumes it, exactly.

cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/interop/hydra_app.py lr=0.02
cluster-ddp submit --nodes 1 --gpus-per-node 2 --array lr=0.01,0.02 -- python examples/interop/hydra_app.py lr={lr}

- Output: Hydra's log and .hydra/ are in the run directory's hydra/, not in outputs/DATE/TIME: that would be another
  folder on each rank, and after each requeue. Each rank has a folder of its own there.
- Requeue: by the batch script, at status 75. Hydra lets SystemExit pass.
- Not `--multirun`: it would run all settings in one job. An array has a job, and a requeue, for each.
"""

from dataclasses import dataclass, field
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from hydra.core.config_store import ConfigStore
from torch.utils.data import TensorDataset

import cluster_ddp


@dataclass
class Config:
    """The options of the training, and where Hydra writes."""

    lr: float = 0.01
    epochs: int = 2
    hydra: Any = field(
        default_factory=lambda: {"run": {"dir": "${oc.env:CLUSTER_DDP_RUN_DIR,outputs}/hydra/rank${oc.env:RANK,0}"}}
    )


ConfigStore.instance().store(name="training", node=Config)


@hydra.main(version_base=None, config_name="training")  # type: ignore[untyped-decorator]  # without Hydra it is Any
def main(config: Config) -> None:
    """Train a linear model on random data."""
    with cluster_ddp.distributed() as world:
        torch.manual_seed(1)
        inputs = torch.randn(640, 8)
        shard = world.shard(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle_seed=1)
        linear = torch.nn.Linear(8, 1)
        model = world.wrap(linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
        for _ in checkpoint.epochs(config.epochs):
            for batch, targets in shard:
                optimizer.zero_grad()
                F.mse_loss(model(batch), targets).backward()
                optimizer.step()
                checkpoint.step()
        world.print(f"Done: {checkpoint.steps} steps, weights {linear.weight.sum().item():.9f}")


if __name__ == "__main__":
    main()
