"""`world.shard(dataset, global_batch=…)`: the same samples in the same updates on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.errors import DataError, SpecError
from cluster_ddp.runtime.checkpoint import stop_agreement
from cluster_ddp.runtime.data.device_dataset import DeviceLoader, ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Shard

JOB_ID = job_ids()
SIZE, GLOBAL_BATCH, EPOCHS = 103, 20, 3  # six updates in an epoch, the last two of 12 and 11 samples


def shards(size: int, global_batch: int, batch_size: int | None, world_size: int, **more: Any) -> list[Shard]:
    """Of each rank, over the numbers of the samples."""
    found = []
    for rank in range(world_size):
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": 3}
        batches = DistributedBatchSampler(size, batch_size, global_batch=global_batch, **{**place, **more})
        found.append(Shard(batches, DeviceLoader(ResidentSet(torch.arange(size)), batches)))
    return found


def updates_of(shard: Shard) -> list[list[tuple[list[int], float]]]:
    """For each update, the numbers in its batches, and the part that each has of the update's gradient."""
    found: list[list[tuple[list[int], float]]] = []
    for (numbers,) in shard:
        scale = shard.loss_scale
        assert scale / len(numbers) == pytest.approx(1 / shard.mean_batch)  # as a summed loss is divided
        found += [[]] if len(found) == shard.step else []
        found[-1].append((numbers.tolist(), scale / len(numbers) / shard.batches.world_size))
    assert len(found) == len(shard)
    return found


SIZES = st.integers(1, 300), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 9)), st.integers(1, 6)


@pytest.mark.quick
@given(*SIZES)
def test_updates_do_not_depend_on_the_number_of_ranks(size: int, total: int, most: int | None, ranks: int) -> None:
    try:
        of_ranks = [updates_of(shard) for shard in shards(size, total, most, ranks)]
    except DataError:
        assert min(size, (total + 1) // 2) < ranks  # no rank may be without samples
        return
    alone = updates_of(shards(size, total, None, 1)[0])
    most = most or -(-total // ranks)
    for (whole,), *shares in zip(alone, *of_ranks, strict=True):
        assert len({len(share) for share in shares}) == 1  # all ranks in the same number of batches
        parts = [part for share in shares for part in share]
        assert sorted(number for numbers, _ in parts for number in numbers) == sorted(whole[0])
        assert [weight for _, weight in parts] == pytest.approx([1 / len(whole[0])] * len(parts))
        assert all(0 < len(numbers) <= max(most, 2 if len(whole[0]) % ranks else 1) for numbers, _ in parts)
        counts = [sum(len(numbers) for numbers, _ in share) for share in shares]
        assert max(counts) - min(counts) <= 1
    assert sorted(number for ((numbers, _),) in alone for number in numbers) == list(range(size))
    assert all(total / 2 <= len(numbers) <= total for ((numbers, _),) in alone) or size < total


def test_an_uneven_share_and_the_end_of_an_epoch() -> None:
    """512 samples on three ranks; then two halves of the 608 that are left."""
    first, _, last = shards(512 + 608, 512, 64, 3)
    sizes = [[len(numbers) for numbers, _ in update] for update in updates_of(last)]
    assert sizes == [[57, 57, 56], [51, 50], [51, 50]]
    assert [len(numbers) for numbers, _ in updates_of(first)[0]] == [57, 57, 57]
    (dropped,) = shards(512 + 608, 512, 64, 1, drop_last=True)
    assert [sum(len(numbers) for numbers, _ in update) for update in updates_of(dropped)] == [512, 512]
    (own,) = shards(4, 2, None, 1, sampler=lambda seed, epoch: [3, 3, 0, 1])
    assert [numbers for ((numbers, _),) in updates_of(own)] == [[3, 3], [0, 1]]


@given(*SIZES, st.integers(1, 6), st.integers(0, 20))
def test_another_number_of_ranks_makes_the_other_updates(
    size: int, total: int, most: int | None, ranks: int, others: int, done: int
) -> None:
    if min(size, (total + 1) // 2) < max(ranks, others):
        return
    (shard, *_), whole = shards(size, total, most, ranks), updates_of(shards(size, total, None, 1)[0])
    for _ in shard:
        if shard.step + 1 == done and shard.ends_update:
            break
    place, rest = shard.place(), dict[int, list[int]]()
    for later in shards(size, total, 3, others):
        later.resume_at(0, place, [])
        for (numbers,) in later:
            rest.setdefault(later.step, []).extend(numbers.tolist())
    assert [sorted(rest[step]) for step in sorted(rest)] == [sorted(one[0][0]) for one in whole[place["step"] :]]


def test_amid_an_update_the_place_is_the_end_of_the_one_before() -> None:
    (shard,) = shards(50, 20, 8, 1)
    with pytest.raises(DataError, match="no batch was taken yet"):
        _ = shard.loss_scale
    places = [(shard.place()["step"], shard.place()["seen"], shard.progress) for _ in shard]
    assert places[:6] == [(0, 0, 0), (0, 0, 0), (1, 20, 0), (1, 20, 0.4), (2, 35, 0.4), (2, 35, 0.7)]
    assert places[6:] == [(3, 50, 0.7)] and shard.is_at_end


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((100, 2, None, 3), "Sharing updates of 2 samples among 3 ranks:\n  one update has 2 samples"),
        ((100, 2, None, 3), "use at most 2 GPUs, or global_batch=6 or more"),
        ((2, 50, 8, 3), "Hint: use at most 2 GPUs$"),
        ((100, 0, 8, 1), "Batches of 0 samples"),
        ((100, 8, 0, 1), "Batches of 0 samples"),
        ((100, None, None, 1), "Sharing samples without a batch_size"),
    ],
)
def test_shares_that_cannot_be_are_refused(given: tuple[int, Any, Any, int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        shards(*given)


def test_a_loop_that_forgets_what_is_accumulated_is_told(
    world: cluster_ddp.World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = world.wrap(nn.Linear(1, 1))
    shard = world.shard(TensorDataset(torch.arange(8)), global_batch=4, batch_size=2)
    for every, words in ((2, "leave every= out"), (0, "1 or more")):
        with pytest.raises(SpecError, match=words):
            world.accumulate(model, shard, every=every).__enter__()
    with pytest.raises(SpecError, match="every=4"):
        world.accumulate(model, 0).__enter__()
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=tmp_path / "run", every="never", model=model)
    for _ in checkpoint.epochs(1):
        for number, _ in enumerate(shard):
            if number % 2 == 0:
                with pytest.raises(SpecError, match=r"in update \d of the epoch:\n  this is not its last batch"):
                    checkpoint.step()
            else:
                checkpoint.step()
    assert checkpoint.steps == 2 and caplog.text.count("multiply the mean loss of each batch by it") == 1


def test_an_evaluation_on_another_shard_is_no_mistake(
    world: cluster_ddp.World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It weights no loss, and may end amid an update."""
    model, numbers = world.wrap(nn.Linear(1, 1)), TensorDataset(torch.arange(8))
    train, test = (world.shard(numbers, global_batch=4, batch_size=2) for _ in range(2))
    checkpoint = cluster_ddp.Checkpointer(world, shard=train, run_dir=tmp_path / "run", model=model)
    for _ in checkpoint.epochs(2):
        for _ in train:
            with world.accumulate(model, train) as is_last:
                assert train.loss_scale == 0.5
            if is_last:
                next(iter(test))
                checkpoint.step()
        for _ in test:
            pass
    assert checkpoint.steps == 4 and "loss_scale" not in caplog.text


class Loop:
    """A training as a user writes it, in float64."""

    def __init__(self, world: cluster_ddp.World, batch_size: int | None, *, dropout: float = 0.0, **how: Any) -> None:
        self.world = world
        self.losses: list[float | None] = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
        self.model: nn.Module = world.wrap(model, **how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        x = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = TensorDataset(x, x.argmax(1) % 3)
        self.shard = world.shard(data, global_batch=GLOBAL_BATCH, batch_size=batch_size, shuffle_seed=1)
        world.seed_rank(3)

    def train(self, run_dir: Path, at: Callable[[int], object] = lambda _: None, **options: Any) -> list[Any]:
        """Train; call `at` before each step. Return the mean loss of each update, and the weights."""
        losses, where = cluster_ddp.Meter(self.world), {"run_dir": cluster_ddp.RunDir(run_dir, self.world), **options}
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        checkpoint = cluster_ddp.Checkpointer(self.world, shard=self.shard, **{"every": "never", **where}, **parts)
        for _ in checkpoint.epochs(EPOCHS):
            for x, y in self.shard:
                with self.world.accumulate(self.model, self.shard) as is_last:
                    loss = nn.functional.cross_entropy(self.model(x), y)
                    (loss * self.shard.loss_scale).backward()
                losses.add(loss * len(y), len(y))
                if is_last:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.losses.append(losses.mean())
                    losses.reset()
                    at(checkpoint.steps + 1)
                    checkpoint.step()
                    checkpoint._saver.wait()  # so that no save is skipped
        weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in self.model.parameters()]
        return [self.losses, torch.cat([one.flatten() for one in weights]).tolist()]


class Killed(BaseException):
    """Stands in for SIGKILL on all ranks."""


def is_exact(world: cluster_ddp.World, folder: Path) -> bool:
    """Whether a training with dropout that is killed amid an epoch continues to the same bits."""

    def kill(step: int) -> None:
        if step == 10:
            raise Killed

    whole, resumed = Loop(world, 3, dropout=0.5).train(folder / "whole"), Loop(world, 3, dropout=0.5)
    with pytest.raises(Killed):
        Loop(world, 3, dropout=0.5).train(folder / "killed", kill, every="4steps")
    return resumed.train(folder / "resumed", resume=folder / "killed") == [whole[0][8:], whole[1]]


def everything() -> None:
    """What a set of ranks does: whole trainings, one that is killed, and its part of the one that all sets continue."""
    stop_agreement.AGREE_EVERY_S = 0.0
    folder, stop_at = Path(os.environ["FOLDER"]), int(os.environ["STOP_AT"])

    def stop(step: int) -> None:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)

    with cluster_ddp.distributed(cuda=False) as world:
        own = folder / f"of-{world.world_size}"
        sharded: dict[str, Any] = {"strategy": "fsdp", "blocks": nn.Linear}
        found: dict[str, Any] = {}
        if world.world_size == 3:
            found["sharded"] = Loop(world, 3, **sharded).train(own / "3")
            found["is exact"] = is_exact(world, own)
        found["whole share"] = Loop(world, None).train(own / "1")
        found["three at once"] = Loop(world, 3).train(own / "2")
        moving = Loop(world, 3)
        try:
            found["moved"] = moving.train(folder / "moved", stop)
        finally:
            found["losses"] = moving.losses
            (folder / f"{world.world_size}-{world.rank}.json").write_text(json.dumps(found))


SETS = ((2, 2), (3, 8), (1, 13), (4, 0))
"""Numbers of ranks, and the step at which they are told to stop, amid an epoch; 0: they go to the end."""


@pytest.mark.full
def test_the_curve_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """And in a run that shrinks and grows."""
    found, losses = {}, []
    for ranks, stop_at in SETS:
        env = {"FOLDER": str(tmp_path), "STOP_AT": str(stop_at)}
        steps = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **env) for rank in range(ranks)]
        ends = run_ranks(everything, steps, tmp_path)
        assert [end.exit_code for end in ends] == [75 if stop_at else 0] * ranks, ends
        found[ranks] = [json.loads((tmp_path / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        losses += found[ranks][0]["losses"]
    expected, weights = found[1][0]["whole share"]
    assert len(expected) == 6 * EPOCHS and expected[-1] < 0.7 * expected[0]
    for of_rank in (one for ranks in found.values() for one in ranks):
        for case in {"whole share", "three at once", "sharded"} & of_rank.keys():
            assert of_rank[case] == [pytest.approx(expected, rel=1e-9), pytest.approx(weights, rel=1e-9)], case
        assert of_rank.get("is exact", True)
    assert {"sharded", "is exact"} < found[3][2].keys()
    assert losses == pytest.approx(expected, rel=1e-9)
    assert found[4][0]["moved"][1] == pytest.approx(weights, rel=1e-9)
