"""Trainings on a stream: stopped or killed anywhere, they end with the same bits; all ranks end an epoch together."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step
from torch.utils.data import IterableDataset, get_worker_info

import cluster_ddp
from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint import stop_agreement
from cluster_ddp.runtime.world import World

JOB_ID = job_ids()


class Killed(BaseException):
    """Ends a training as a kill would: nothing more is written."""


class Samples(IterableDataset[torch.Tensor]):
    """Numbers in an order that it draws, and noise. With `sizes` it takes the share of a rank and worker itself."""

    def __init__(self, size: int, rank: int = 0, sizes: tuple[int, ...] = ()) -> None:
        self.size, self.rank, self.sizes = size, rank, sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.sizes:
            info = get_worker_info()
            numbers = range(1000 * self.rank, 1000 * self.rank + self.sizes[self.rank])
            order = list(numbers if info is None else numbers[info.id :: info.num_workers])
        else:
            order = random.sample(range(self.size), self.size)
        for number in order:
            yield torch.tensor([float(number), torch.rand(()).item()])


class Stateful(Samples):
    """It resumes by its state. The state has a random number that is drawn in each step, too."""

    place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.place, self.size):
            self.place = number + 1
            yield torch.tensor([float(number), random.random()])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Training:
    """Two epochs of a model with dropout; after each an evaluation, and the best is kept."""

    def __init__(self, world: World, stream: cluster_ddp.Stream, **options: Any) -> None:
        torch.manual_seed(1)
        self.world, self.stream, self.samples = world, stream, []
        self.model = world.wrap(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loss = cluster_ddp.Meter(world)
        world.seed_rank(1)
        parts = {"model": self.model, "optimizer": self.optimizer, "meters": {"loss": self.loss}}
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=stream, **parts, **options)

    def run(self, end_at: int = -1, *, is_asked: bool = False) -> Training:
        for _ in self.checkpoint.epochs(2):
            for batch in self.stream:
                self.optimizer.zero_grad()
                loss = self.model(batch / 100).square().sum() / self.stream.mean_batch
                loss.backward()
                self.optimizer.step()
                self.loss.add(loss, len(batch))
                self.samples += batch[:, 0].tolist()
                self.end(self.checkpoint.steps == end_at, is_asked)
                self.checkpoint.step()
            self.checkpoint.best("loss", self.loss.mean() or 0.0, mode="min")
        return self

    def end(self, is_here: bool, is_asked: bool) -> None:
        if is_here and is_asked:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif is_here:
            self.checkpoint._folder.writer.wait()
            self.checkpoint.run_dir._metrics.finish(60)
            raise Killed

    def digest(self) -> str:
        values = [*self.model.module.state_dict().values(), torch.rand(1)]
        return hashlib.sha256(repr([value.tolist() for value in values]).encode()).hexdigest()


def made(world: World, kind: str, workers: int) -> cluster_ddp.Stream:
    if kind == "own":
        return world.stream(Samples(0, sizes=(26,)), batch_size=4, split="own", num_workers=workers)
    return world.stream((Samples if kind == "count" else Stateful)(26), batch_size=4, num_workers=workers)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("count", 2),
        *(pytest.param(*one, marks=pytest.mark.full) for one in [("count", 0), ("state", 0), ("state", 2), ("own", 2)]),
    ],
)
def test_a_stream_that_was_ended_anywhere_ends_with_the_same_bits(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, workers: int
) -> None:
    whole = Training(world, made(world, kind, workers), run_dir=tmp_path / "whole").run()
    assert whole.checkpoint.steps in (14, 16)  # of two workers, each has a smaller batch at its end
    assert (tmp_path / "whole/checkpoints/best-loss.pt").exists()
    expected, ends = whole.digest(), whole.checkpoint.steps
    points = range(ends) if not workers else (2, ends // 2 - 1, ends - 3)
    for point in points:
        for is_asked in (True, False):
            options: dict[str, Any] = {"run_dir": tmp_path / f"{point}-{is_asked}", "every": "3steps"}
            with pytest.raises((Killed, cluster_ddp.Stopped)):
                Training(world, made(world, kind, workers), **options).run(point, is_asked=is_asked)
            resumed = Training(world, made(world, kind, workers), **options).run()
            assert resumed.digest() == expected, (point, is_asked)
            assert whole.samples[len(whole.samples) - len(resumed.samples) :] == resumed.samples
    assert "samples seen" in capsys.readouterr().out


def test_what_does_not_fit_a_stream_is_said(world: World, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Training(world, made(world, "count", 0), run_dir=tmp_path, every="2steps").run(5)
    for other, words in (
        ("own", "split='items', and here it is a stream with split='own'"),
        ("shard", "it is a shard"),
    ):
        data: Any = world.shard(torch.zeros(26, 2), batch_size=4) if other == "shard" else made(world, other, 0)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=words):
            Training(world, data, run_dir=tmp_path)

    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"place": {1, 2}}

    with pytest.raises(CheckpointError, match=r"the stream's state\['iterable'\]\['place'\] is a set"):
        Training(world, world.stream(Odd(26), batch_size=4), run_dir=tmp_path / "odd").run()


# Several ranks


def in_ranks(kind: str, end_at: int) -> None:
    """In a rank: a whole training, or one that ends at a step; what it saw as JSON."""
    stop_agreement.AGREE_EVERY_S = 0.0
    with cluster_ddp.distributed(cuda=False) as world:
        if kind == "own":
            other_shares(world)
            samples: Any = Samples(0, world.rank, sizes=(9, 26))
        else:
            samples = Stateful(45) if kind == "state" else Samples(45)
        stream = world.stream(samples, batch_size=4, split="own" if kind == "own" else "items")
        training = Training(world, stream, every="2steps")
        found: dict[str, Any] = {}
        try:
            training.run(end_at, is_asked=True)
        finally:
            found |= {"samples": training.samples, "steps": training.checkpoint.steps, "digest": training.digest()}
            print(json.dumps(found), flush=True)


def other_shares(world: World) -> None:
    """A stream that splits itself is not split again; one that does not, but should, is told."""
    with pytest.raises(cluster_ddp.DataError, match="do not all read the same first item"):
        list(world.stream(Samples(0, world.rank, sizes=(9, 9)), batch_size=2))
    for _ in world.stream(range(8), batch_size=2, split="own"):
        pass


def start(folder: Path, kind: str, ranks: int, end_at: int = -1) -> tuple[list[Outcome], list[Any]]:
    folder.mkdir(exist_ok=True)
    for log in folder.glob("rank*.log"):
        log.unlink()
    env = {"CLUSTER_DDP_RUN_DIR": str(folder / "run")}
    steps = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **env) for rank in range(ranks)]
    ends = run_ranks(functools.partial(in_ranks, kind, end_at), steps, folder)
    lines = [[line for line in end.output.splitlines() if line[:1] == "{"] for end in ends]
    return ends, [json.loads(line[0]) if line else {} for line in lines]


@pytest.mark.quick
def test_ranks_of_unequal_ends_stop_together_and_resume_exactly(tmp_path: Path) -> None:
    ends, whole = start(tmp_path / "whole", "own", 2)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert [rank["steps"] for rank in whole] == [6, 6]  # rank 0 has three batches
    assert whole[0]["samples"] == [*map(float, range(9))] * 2
    assert whole[1]["samples"] == [*map(float, range(1000, 1012))] * 2
    said = ends[0].output
    assert said.count("The stream ended on 1 of 2 ranks. What the others had left of this epoch was not trained.") == 1
    assert "gives several ranks or workers the same first item" in said
    ends, _ = start(tmp_path / "stopped", "own", 2, end_at=3)
    assert [end.exit_code for end in ends] == [75, 75], ends
    ends, resumed = start(tmp_path / "stopped", "own", 2)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]


@pytest.mark.fault(
    "a training on a stream resumes on another number of ranks in the middle of an epoch",
    "`split='items'`: as another number of ranks with `shard`. `split='own'`: an error; resume with as many ranks as "
    "before",
    also=("test_other_shares_are_refused_in_the_middle_of_an_epoch_only",),
)
@pytest.mark.parametrize("kind", ["count", "state"])
def test_another_number_of_ranks_trains_the_rest_of_the_epoch(tmp_path: Path, kind: str) -> None:
    ends, before = start(tmp_path, kind, 2, end_at=2)
    assert [end.exit_code for end in ends] == [75, 75], ends
    ends, after = start(tmp_path, kind, 1)
    assert ends[0].exit_code == 0, ends
    steps = before[0]["steps"]
    first_epoch = [*before[0]["samples"], *before[1]["samples"], *after[0]["samples"][: 45 - 8 * steps]]
    assert sorted(first_epoch) == [*map(float, range(45))]
    assert sorted(after[0]["samples"][45 - 8 * steps :]) == [*map(float, range(45))]
