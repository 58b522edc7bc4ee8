"""What a user's own model and loop ask of the world: on two ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.model.ddp import unwrapped

JOB_ID = job_ids()


class Branches(nn.Module):
    """Uses one of its layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def everything() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        options_of_ddp(world)
        sync_batchnorm(world)
        compiled(world)
        accumulation(world)
        collectives(world)
        world.print("all", "right", sep=" is ")


def options_of_ddp(world: cluster_ddp.World) -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": 1, "place": False}):
        torch.manual_seed(0)
        model = world.wrap(Branches() if options.get("find_unused_parameters") else nn.Linear(3, 1), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            optimizer.step()
        weights = [parameter.tolist() for parameter in model.parameters()]
        assert world.gather(weights) == [weights, weights]


def sync_batchnorm(world: cluster_ddp.World) -> None:
    model = world.wrap(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), sync_batchnorm=True)
    assert type(model.module[1]) is nn.BatchNorm1d


def compiled(world: cluster_ddp.World) -> None:
    inside = world.wrap(torch.compile(nn.Linear(3, 1), backend="eager"))  # type: ignore[arg-type]
    outside = torch.compile(world.wrap(nn.Linear(3, 1)), backend="eager")
    for model in (inside, outside):
        assert list(unwrapped(model).state_dict()) == ["weight", "bias"]
        with world.accumulate(model, 0, every=2) as is_last:  # type: ignore[arg-type]
            assert not is_last


def accumulation(world: cluster_ddp.World) -> None:
    """The gradients of four batches in two groups of an epoch of five: those of one batch of all."""
    torch.manual_seed(0)
    model = world.wrap(nn.Linear(3, 1))
    updates = []
    shard = world.shard(TensorDataset(torch.arange(10)), batch_size=1)
    for step, _ in enumerate(shard):
        with world.accumulate(model, shard, every=2) as is_last:
            model(batch(step, world.rank)).square().mean().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        same = world.gather(gradient.clone())
        assert torch.equal(same[0], same[1]) == is_last
        if is_last:
            updates.append(step)
            if step == 1:
                torch.manual_seed(0)
                other = nn.Linear(3, 1)
                for number in (0, 1):
                    for rank in (0, 1):
                        (other(batch(number, rank)).square().mean() / 2).backward()
                assert other.weight.grad is not None
                torch.testing.assert_close(gradient, other.weight.grad)
            model.zero_grad()
    assert updates == [1, 3, 4]


def collectives(world: cluster_ddp.World) -> None:
    assert (world.max(world.rank), world.min(torch.tensor(world.rank))) == (1, 0)
    mine = torch.tensor([[1, 2], [3, 4]]) * (world.rank + 1)
    assert world.all_reduce(mine).tolist() == [[3, 6], [9, 12]]
    assert world.all_reduce(mine, "max").tolist() == [[2, 4], [6, 8]]
    assert mine.tolist() == (torch.tensor([[1, 2], [3, 4]]) * (world.rank + 1)).tolist()
    made = Path(os.environ["MADE"])
    with world.main_first():
        assert made.exists() == (not world.is_main)
        made.touch()
    with world.main_first(of_node=True):
        pass


@pytest.mark.quick
def test_what_two_ranks_can_do(tmp_path: Path) -> None:
    environments = [slurm_step(rank, 2, job_id=JOB_ID, MADE=str(tmp_path / "made")) for rank in range(2)]
    ends = run_ranks(everything, environments, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert ends[0].output.count("SyncBatchNorm needs GPUs") == 1
    assert "all is right\n" in ends[0].output and "all is right" not in ends[1].output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find_unused": True}, "Did you mean find_unused_parameters?"),
        ({"device_ids": [0]}, "for a model on several devices: world.wrap(model, place=False)"),
        ({"nonsense": 1}, "its options are dim, broadcast_buffers"),
    ],
)
def test_options_that_ddp_has_not(world: cluster_ddp.World, options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        world.wrap(nn.Linear(1, 1), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda world: world.accumulate(world.wrap(nn.Linear(1, 1)), 0, every=0).__enter__(),
        lambda world: world.accumulate(nn.Linear(1, 1), 0, every=2).__enter__(),
    ],
)
def test_wrong_values_are_a_short_error(world: cluster_ddp.World, wrong) -> None:
    with pytest.raises(SpecError):
        wrong(world)


def test_mixed_precision(world: cluster_ddp.World) -> None:
    with world.autocast():
        assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.bfloat16
    assert not world.grad_scaler(torch.bfloat16).is_enabled()


def clipped_step(
    world: cluster_ddp.World, model: nn.Module, scaler: torch.amp.GradScaler, *, unscales: bool = True
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    world.clip_grad_norm(model, 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_clipped_gradients_are_scaled_back_before_or_it_is_said(
    world: cluster_ddp.World, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = world.wrap(nn.Linear(1, 1)), world.wrap(nn.Linear(1, 1))
    half, also_half, full = [world.grad_scaler(one) for one in (torch.float16, torch.float16, torch.bfloat16)]
    for _ in range(2):
        clipped_step(world, one, half)
        clipped_step(world, other, also_half)
        clipped_step(world, other, full, unscales=False)
    also_half.scale(other(torch.ones(1, 1)).sum()).backward()
    clipped_step(world, one, half)
    also_half.unscale_(torch.optim.SGD(other.parameters(), lr=0.1))
    assert not caplog.records
    for _ in range(2):
        clipped_step(world, one, half, unscales=False)
    assert [record.message.count("call scaler.unscale_") for record in caplog.records] == [1]


def rank_1_comes_late_to_the_first_step() -> None:
    with cluster_ddp.distributed(cuda=False, collective_timeout_s=20) as world:
        model, came = world.wrap(nn.Linear(3, 1)), Path(os.environ["CAME"])
        while world.rank == 1 and not came.exists():
            time.sleep(0.05)
        loss = model(batch(0, world.rank)).sum()
        came.touch()
        loss.backward()


def test_the_first_forward_pass_waits_for_nobody(tmp_path: Path) -> None:
    """DDP would let rank 0 broadcast the order of the buckets there, for which NCCL has no limit of ours."""
    steps = [slurm_step(rank, 2, job_id=JOB_ID + 1, CAME=str(tmp_path / "came")) for rank in range(2)]
    ends = run_ranks(rank_1_comes_late_to_the_first_step, steps, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends


def test_an_epochs_last_group_ends_with_it_whatever_the_number_of_ranks_that_began_it(world: cluster_ddp.World) -> None:
    """Two ranks have made four steps; one rank makes the others."""
    model, shard = world.wrap(nn.Linear(1, 1)), world.shard(TensorDataset(torch.arange(11)), batch_size=1)
    shard.resume(0, step=4, seen=8)
    ends = []
    for _ in shard:
        with world.accumulate(model, shard, every=4) as is_last:
            ends.append((shard.step, is_last))
    assert ends == [(4, False), (5, False), (6, True)]
    with world.accumulate(model, 3, every=4) as is_last:  # data of one's own
        assert is_last
