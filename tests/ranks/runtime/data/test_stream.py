"""A stream's batches: who gets which, how they end, and how a stream resumes in an epoch."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from slowness import wait_until
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import cluster_ddp
from cluster_ddp import processes
from cluster_ddp.errors import ClusterDDPError, DataError
from cluster_ddp.runtime.data.stream import Stream
from cluster_ddp.runtime.data.stream_reader import Order, PassStart, StreamReader
from cluster_ddp.runtime.data.world_data import splits_itself
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology


class Numbers(IterableDataset[Any]):
    """Numbers in the order of an epoch, each with random numbers of all generators."""

    def __init__(self, size: int, parts: int = 1) -> None:
        self.size, self.parts, self.epoch = size, parts, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (0, 1) if self.parts == 1 or worker is None else (worker.id, worker.num_workers)
        # All draw the order of "items" alike; a share of its own is taken from an order that follows from the epoch.
        draw = random if self.parts == 1 else random.Random(self.epoch)
        order = draw.sample(range(self.size), self.size)
        for number in order[part::parts]:
            yield number + 100 * self.epoch, random.random() + float(np.random.rand()) + torch.rand(()).item()


class Counting(IterableDataset[Any]):
    """It has a state, and begins anew only if it has come to its end."""

    def __init__(self, size: int) -> None:
        self.size, self.place, self.read = size, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.size:
            self.place, self.read = self.place + 1, self.read + 1
            yield self.place, random.random()
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def drained(stream: Stream) -> list[Any]:
    return [(stream.step, stream.seen, stream.is_at_end, [part.tolist() for part in batch]) for batch in stream]


def dealt(rank: int, ranks: int, size: int, batch_size: int, seen: int = 0, workers: int = 1) -> list[list[int]]:
    """The batches of a rank; each worker reads for itself, and is asked in turn."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "split": "items",
        "drop_last": False,
        "replay": False,
        "seed": 0,
    }
    readers = [StreamReader(range(size), collate=list, rank=rank, world_size=ranks, **options) for _ in range(workers)]
    found = []
    for step in range(size + 1):
        start = PassStart(0, seen) if step < workers else None
        record = readers[step % workers][Order(0, step, start)]
        if record.is_end:
            break
        assert record.samples == len(record.batch)
        found.append(record.batch)
    return found


LATER = [pytest.param(*one, marks=pytest.mark.full) for one in [(1, 3), (2, 1), (5, 1)]]


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 4), (3, 2), *LATER])
def test_each_item_is_on_one_rank_whatever_the_number_of_ranks_and_workers(ranks: int, batch_size: int) -> None:
    for size in range(ranks, 40):
        of_ranks = [dealt(rank, ranks, size, batch_size) for rank in range(ranks)]
        assert len({len(batches) for batches in of_ranks}) == 1
        assert all(batch for batches in of_ranks for batch in batches)
        steps = [sorted(flat(batches)) for batches in zip(*of_ranks)]
        assert flat(steps) == list(range(size))
        assert of_ranks[0] == dealt(0, ranks, size, batch_size, workers=3)
        seen = sum(map(len, steps[: len(steps) // 2]))
        if size - seen >= 4:  # four ranks resume
            rest = [dealt(rank, 4, size, batch_size, seen) for rank in range(4)]
            assert sorted(flat(flat(rest))) == list(range(seen, size))


def saved(stream: Stream) -> tuple[dict[str, Any], list[Any]]:
    return stream.place(), [stream.place_of_rank()]


def jittered(items: list[Any]) -> list[torch.Tensor]:
    """What it draws depends on the batch only, and changes nothing that the iterable draws."""
    return [torch.tensor(part) for part in zip(*((*item, random.random()) for item in items))]


def numbers(world: World, workers: int, split: str) -> Stream:
    options: dict[str, Any] = {"split": split, "seed": 3, "num_workers": workers, "collate_fn": jittered}
    return world.stream(Numbers(23, parts=2 if split == "own" else 1), batch_size=4, **options)


@pytest.mark.parametrize(("workers", "split"), [(0, "items"), (2, "items"), (2, "own")])
def test_it_resumes_after_each_batch_with_the_same_random_numbers(world: World, workers: int, split: str) -> None:
    whole = numbers(world, workers, split)
    before, places, batches = torch.get_rng_state(), [], []
    for epoch in (0, 1):
        whole.set_epoch(epoch)
        for batch in whole:
            batches.append((whole.step, whole.seen, whole.is_at_end, [part.tolist() for part in batch]))
            places.append((epoch, *saved(whole)))
    assert torch.equal(torch.get_rng_state(), before)  # the training's generators are left alone
    values = [batch[3][0] for batch in batches]
    assert sorted(flat(values)) == [*range(23), *range(100, 123)]
    assert values[0] != [value - 100 for value in values[len(values) // 2]]  # another order in each epoch
    for number in (0, 3, len(batches) // 2 - 1, len(batches) - 2):
        resumed = numbers(world, workers, split)
        epoch, place, of_ranks = places[number]
        resumed.resume_at(epoch, place, of_ranks)
        rest = drained(resumed)
        if epoch == 0:
            assert resumed.is_at_end
            resumed.set_epoch(1)
            rest += drained(resumed)
        assert rest == batches[number + 1 :]
    if split == "items":
        assert batches[: len(batches) // 2] == drained(numbers(world, 2 - workers, split))


class Plain(IterableDataset[int]):
    """It draws nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_what_the_collate_function_draws_differs_from_batch_to_batch(world: World) -> None:
    stream = world.stream(Plain(), batch_size=4, seed=3, num_workers=0, collate_fn=lambda items: random.random())
    first, second = stream
    assert first != second
    stream.set_epoch(1)
    assert {first, second}.isdisjoint(stream)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_that_of_the_batch_that_was_taken(world: World, workers: int) -> None:
    """Not that of a batch ahead. What was read before is not read again."""
    streams = [world.stream(Counting(14), batch_size=3, split="own", num_workers=workers) for _ in range(3)]
    passes = iter(streams[0])
    for _ in range(2):
        next(passes)
    place = saved(streams[0])
    rest = [[part.tolist() for part in batch] for batch in passes]
    streams[1].resume_at(0, *place)
    assert [found[3] for found in drained(streams[1])] == rest
    if not workers:
        replayed = world.stream(Counting(14), batch_size=3, split="own", replay=True)
        replayed.resume_at(0, *place)
        assert [found[3] for found in drained(replayed)] == rest
        assert replayed._loader.dataset.iterable.read == 14
        assert streams[1]._loader.dataset.iterable.read == 14 - 6
        next(iter(streams[2]))  # left in the middle: the next pass begins anew
        assert drained(streams[2])[0][3][0] == [1, 2, 3]


def test_what_a_loader_gives_is_resumed_by_count_or_by_its_state(world: World) -> None:
    class Stateful(DataLoader[Any]):
        """Stands in for torchdata's: its state is a number of batches."""

        start = given = 0

        def __iter__(self) -> Any:
            start, self.start = self.start, 0
            for number, batch in enumerate(super().__iter__()):
                self.given = number + 1
                if number >= start:
                    yield batch

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start = state["given"]

    for kind in (DataLoader, Stateful):
        first, second = (world.stream(kind(range(10), batch_size=4), batch_size=None) for _ in range(2))
        passes = iter(first)
        assert next(passes).tolist() == [0, 1, 2, 3]
        assert (first.split, first.seen, first.is_full_batch) == ("own", 4, True)
        second.resume_at(0, *saved(first))
        assert [batch.tolist() for batch in second] == [[4, 5, 6, 7], [8, 9]]
        assert (second.seen, second.size) == (10, 10)


def test_drop_last_and_what_is_known_of_a_batch(world: World) -> None:
    stream = world.stream(range(10), batch_size=4, drop_last=True)
    assert (stream.size, stream.progress, stream.samples_per_s) == (None, 0.0, 0.0)
    assert [batch.tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (stream.size, stream.mean_batch, stream.is_full_batch) == (8, 4.0, True)
    with pytest.raises(DataError, match=r"1 of them have no batch.\n  Hint: is the iterable empty"):
        list(world.stream([], batch_size=2))


def test_a_stream_that_splits_itself_is_not_split_again(world: World) -> None:
    """Each worker reads another share: with split="items" half of it would be lost."""
    with pytest.raises(DataError, match=r'do not all read the same first item.*\n  Hint: .*split="own"'):
        list(world.stream(Numbers(12, parts=2), batch_size=2, split="items", num_workers=2))
    for package, expected in (("datasets.iterable_dataset", True), ("webdataset.compat", True), ("mine", False)):
        kind = type("Kind", (Numbers,), {"__module__": package, "_distributed": None})
        derived = type("Derived", (kind,), {})(3)
        assert splits_itself(derived) == expected
        if package.startswith("datasets"):  # Hugging Face's: by worker, but not yet by rank
            two = World(topology=Topology.from_environ(slurm_step(1, 2, job_id=1)), device=torch.device("cpu"))
            with pytest.raises(DataError, match=r"Hint: .*split_dataset_by_node\("):
                two.stream(derived, batch_size=2)


def test_an_iterable_that_draws_its_order_elsewhere_is_told(world: World) -> None:
    class Unseeded(Numbers):
        def __iter__(self) -> Iterator[Any]:
            yield from np.random.default_rng().permutation(100).tolist()

    with pytest.raises(DataError, match="seed its generators the same on all ranks"):
        list(world.stream(Unseeded(1), batch_size=2, num_workers=2))


class Packed(Numbers):
    """Packs numbers in pairs; one that is left over begins the next epoch."""

    def __init__(self, size: int, *, begins_anew: bool) -> None:
        super().__init__(size)
        self.begins_anew, self.left, self.rng = begins_anew, list[int](), random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        if self.begins_anew:
            self.left, self.rng = [], random.Random(1)
        for number in self.rng.sample(range(self.size), self.size):
            self.left.append(number)
            if len(self.left) == 2:
                yield torch.tensor(self.left)
                self.left = []


@pytest.mark.parametrize("begins_anew", [False, True])
def test_what_an_epoch_leaves_to_the_next_one_is_named(
    world: World, caplog: pytest.LogCaptureFixture, begins_anew: bool
) -> None:
    stream = world.stream(Packed(5, begins_anew=begins_anew), batch_size=1)
    for epoch in range(3):
        stream.set_epoch(epoch)
        assert len(list(stream)) in (2, 3)
    words = "it begins with what the epoch before has left, which no checkpoint has: iterable.left, iterable.rng."
    assert caplog.text.count(words) == (not begins_anew)


@pytest.mark.parametrize(
    ("iterable", "options", "words"),
    [
        (iter(range(3)), {}, "it can be read once only"),
        (3, {}, "it can't be iterated over"),
        (range(3), {"batch_size": 0}, "a batch has 1 or more"),
        (range(3), {"split": "item"}, "Did you mean items?"),
        (range(3), {"split": "items", "batch_size": None}, "not items that could be dealt"),
        (DataLoader([1]), {}, "batch_size=None"),
        (DataLoader([1]), {"batch_size": None, "num_workers": 2}, "DataLoader(…, num_workers=2)"),
        (range(3), {"shuffle": True}, "let the iterable shuffle"),
        (range(3), {"num_worker": 2}, "Did you mean num_workers?"),
    ],
)
def test_what_cannot_be_streamed_is_a_short_error(
    world: World, iterable: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClusterDDPError) as caught:
        world.stream(iterable, **{"batch_size": 2, **options})
    assert words in str(caught.value)


def test_other_shares_are_refused_in_the_middle_of_an_epoch_only(world: World) -> None:
    stream = world.stream(Numbers(23, parts=2), batch_size=4, split="own")
    place, of_ranks = stream.place(), [stream.place_of_rank()] * 2
    with pytest.raises(DataError) as caught:
        stream.resume_at(0, {**place, "step": 1}, of_ranks)
    assert "on 1 rank with 1 reader each:\n  2 ranks with 1 reader each saved it" in str(caught.value)
    assert "resume on 2 ranks with num_workers=1" in str(caught.value)
    stream.resume_at(0, {**place, "step": 9, "is_at_end": True}, of_ranks)
    assert drained(stream) == []
    stream.set_epoch(1)
    assert len(drained(stream)) == 6
    two = World(topology=Topology.from_environ(slurm_step(1, 2, job_id=1)), device=torch.device("cpu"))
    second = two.stream(Numbers(23, parts=2), batch_size=4, split="own")
    second.resume_at(0, {**place, "step": 1}, [{**of_ranks[0], "readers": 3}, of_ranks[1]])  # rank 0 has more CPUs


class Stuck(IterableDataset[int]):
    """Its worker writes down its process id, and then gives nothing."""

    def __iter__(self) -> Iterator[int]:
        Path(os.environ["WORKER"]).write_text(str(os.getpid()))
        threading.Event().wait()
        yield 0


def killed_while_its_worker_reads() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        if world.rank == 1:
            threading.Thread(target=next, args=(iter(world.stream(Stuck(), batch_size=1, num_workers=1)),)).start()
            while not (worker := Path(os.environ["WORKER"])).exists() or not worker.read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()


@pytest.mark.fault(
    "a rank with loader workers gets SIGKILL", "its workers end with it, so the others notice at once", bound="at once"
)
def test_a_worker_ends_with_its_rank_and_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    """It has the connections of its rank, which was killed."""
    job_id, worker = job_ids(), tmp_path / "worker"
    environments = [slurm_step(rank, 2, job_id=job_id, WORKER=str(worker)) for rank in range(2)]
    ends = run_ranks(killed_while_its_worker_reads, environments, tmp_path)
    assert [end.exit_code is None for end in ends] == [False, False], ends
    wait_until(lambda: processes.running(int(worker.read_text())) is None)
