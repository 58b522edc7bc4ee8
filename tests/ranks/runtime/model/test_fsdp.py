"""Models that are sharded over the ranks by FSDP2."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.tensor import DTensor

import cluster_ddp
from cluster_ddp.runtime.model.ddp import unwrapped

JOB_ID = job_ids()


class Block(nn.Module):
    """Seven features: on two ranks the shards have different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(7), nn.Linear(7, 7)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.linear(self.norm(x)).relu()  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(world: cluster_ddp.World, model: nn.Module, *, max_norm: float = math.inf, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step in range(steps):
        for half in range(2):
            with world.accumulate(model, half, every=2):
                model(batch(2 * step + half, world.rank)).square().mean().backward()
        norms.append(world.clip_grad_norm(model, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def made(world: cluster_ddp.World) -> Model:
    torch.manual_seed(world.rank)  # all get rank 0's
    return Model()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in unwrapped(model).state_dict().items()
    }


def on_two_ranks() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        plain = world.wrap(made(world))
        sharded = world.wrap(made(world), strategy="fsdp", blocks=Block)
        assert isinstance(sharded, Model) and sharded.layers[0].linear.weight.to_local().shape == (4 - world.rank, 7)
        assert world.weights_digest(plain) == world.weights_digest(sharded)
        norms = trained(world, plain, max_norm=0.5)
        assert trained(world, sharded, max_norm=0.5) == pytest.approx(norms, rel=1e-4)
        assert all(one == world.broadcast(one) for one in norms) and max(norms) > 0.5, norms
        for name, one in whole(sharded).items():
            torch.testing.assert_close(one, whole(plain)[name], msg=name)
        again = world.wrap(made(world), strategy="fsdp", blocks=(Block, nn.Embedding), activation_checkpointing=True)
        assert list(again.state_dict()) == list(Model().state_dict())
        trained(world, again, max_norm=0.5)
        assert world.weights_digest(again) == world.weights_digest(sharded)  # two runs, the same bits
        world.print("all right")


@pytest.mark.quick
def test_a_sharded_model_trains_as_under_ddp(tmp_path: Path) -> None:
    ends = run_ranks(on_two_ranks, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert ends[0].output == "all right\n"
