"""Every sample once, equal steps, whatever the world size."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, RandomSampler, TensorDataset

from cluster_ddp.errors import ClusterDDPError, DataError
from cluster_ddp.runtime.data import batch_iterator, data_loader
from cluster_ddp.runtime.data.data_loader import Loader
from cluster_ddp.runtime.data.device_dataset import DeviceLoader, ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Shard
from cluster_ddp.runtime.data.world_data import epoch_size
from cluster_ddp.runtime.rng import stream_seed
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology


def shard_of(size: int, batches: DistributedBatchSampler) -> Shard:
    """Of the numbers of its samples."""
    return Shard(batches, Loader(Numbers(size), batches, device=torch.device("cpu"), cpus=1, collate_fn=list))


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def ranks(size: int, batch_size: int, world_size: int, seed: int | None = 3) -> list[DistributedBatchSampler]:
    return [
        DistributedBatchSampler(size, batch_size, rank=rank, world_size=world_size, seed=seed)
        for rank in range(world_size)
    ]


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 12))
def test_every_sample_is_on_exactly_one_rank(size: int, batch_size: int, world_size: int) -> None:
    seen = [index for batches in ranks(size, batch_size, world_size) for batch in batches for index in batch]
    assert sorted(seen) == list(range(size))


@pytest.mark.quick
@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 12))
def test_all_ranks_make_the_same_number_of_steps(size: int, batch_size: int, world_size: int) -> None:
    if size < world_size:
        return  # World.shard refuses to train on that
    lengths = {len(list(batches)) for batches in ranks(size, batch_size, world_size)}
    assert lengths == {len(ranks(size, batch_size, world_size)[0])}


@given(st.integers(12, 400), st.integers(1, 12))
def test_a_global_batch_does_not_depend_on_the_number_of_ranks(size: int, world_size: int) -> None:
    """Position by sample count: 12 samples a step, on 1 rank or on several."""
    if 12 % world_size:
        return
    alone = list(ranks(size, 12, 1)[0])
    shared = list(zip(*ranks(size, 12 // world_size, world_size)))
    for one, several in zip(alone[:-2], shared[:-2]):
        assert sorted(one) == sorted(index for share in several for index in share)


def test_epochs_reshuffle_and_repeat_from_the_same_seed() -> None:
    (batches,) = ranks(100, 10, 1)
    first = list(batches)
    batches.epoch = 1
    second = list(batches)
    batches.epoch = 0
    assert first == list(batches)
    assert first != second


def test_without_a_seed_the_order_is_the_datasets() -> None:
    (batches,) = ranks(5, 2, 1, seed=None)
    assert list(batches) == [[0, 1], [2, 3], [4]]


def test_mean_batch_weighs_all_samples_alike() -> None:
    shard = shard_of(103, ranks(103, 10, 4)[0])
    total = sum(shard.mean_batch * 4 for _ in shard)
    assert total == shard.seen == 103
    assert shard.step == len(shard) - 1


@given(st.integers(12, 400), st.integers(1, 6), st.integers(0, 30))
def test_going_on_in_the_middle_of_an_epoch_is_the_rest_of_it(size: int, batch_size: int, step: int) -> None:
    def shard() -> Shard:
        return shard_of(size, ranks(size, batch_size, 3)[1])

    whole = [(one.step, one.seen, one.mean_batch, batch) for one in [shard()] for batch in one]
    done = min(step, len(whole))
    later = shard()
    later.resume(0, step=done, seen=whole[done - 1][1] if done else 0)
    later.set_epoch(0)  # the same epoch: no new beginning
    assert [(later.step, later.seen, later.mean_batch, batch) for batch in later] == whole[done:]


def test_another_number_of_ranks_sees_the_rest_and_nothing_twice() -> None:
    first, seen = [], 0
    for shard in (shard_of(100, batches) for batches in ranks(100, 4, 4)):
        for batch in shard:
            first += batch
            if shard.step == 2:
                break
        seen = shard.seen
    rest = []
    for batches in ranks(100, 4, 3):
        shard = shard_of(100, batches)
        shard.resume(0, step=3, seen=seen)
        rest += [index for batch in shard for index in batch]
    assert sorted(first + rest) == list(range(100))


def test_too_few_samples_for_a_new_number_of_ranks() -> None:
    shard = shard_of(100, ranks(100, 1, 8)[0])
    with pytest.raises(DataError, match="at most 3 GPUs"):
        shard.resume(0, step=97, seen=97)


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 7), st.sampled_from([None, 5]))
def test_gathered_batches_are_the_loaders(size: int, batch_size: int, world_size: int, seed: int | None) -> None:
    for batches in ranks(size, batch_size, world_size, seed):
        resident = ResidentSet(torch.arange(size), transform=lambda numbers: (numbers, 2 * numbers))
        gathered = [[part.tolist() for part in batch] for batch in Shard(batches, DeviceLoader(resident, batches))]
        loaded = list(shard_of(size, batches))
        assert gathered == [[numbers, [2 * number for number in numbers]] for numbers in loaded]


@pytest.mark.fault("a dataset has no samples", "`world.shard` raises an error that suggests checking the path")
@pytest.mark.parametrize("seed", [None, 5])
def test_an_empty_dataset_is_named(seed: int | None) -> None:
    """As that of a folder without images: fewer GPUs would not help."""
    with pytest.raises(DataError, match="the dataset is empty") as error:
        epoch_size(TensorDataset(torch.empty(0, 3)), None, seed, 2)
    assert error.value.asked == "Sharing a TensorDataset among 2 ranks:"
    assert "is its path right?" in error.value.hint and "GPU" not in str(error.value)
    with pytest.raises(DataError, match="the sampler gave no indices for epoch 0"):
        epoch_size(TensorDataset(torch.ones(3)), lambda seed, epoch: [], seed, 2)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="batch_size=64"):
        ranks(10, 0, 1)


@given(st.integers(0, 2**32), st.integers(0, 10_000))
def test_neighbouring_streams_have_different_seeds(seed: int, stream: int) -> None:
    neighbours = {stream_seed(seed + i, stream + j) for i in range(3) for j in range(3)}
    assert len(neighbours) == 9
    assert all(0 <= value < 2**63 for value in neighbours)


def alone() -> World:
    return World(topology=Topology.from_environ({}), device=torch.device("cpu"))


def test_a_sampler_of_ones_own_gives_the_order_of_each_epoch() -> None:
    """Weighted sampling: indices may come twice. On two ranks each global batch is the sampler's."""

    def sampler(seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + epoch)
        return torch.multinomial(torch.tensor([1.0, 0, 3, 0]), 6, replacement=True, generator=generator)

    for epoch in range(2):
        ranks = []
        for rank in range(2):
            batches = DistributedBatchSampler(6, 2, rank=rank, world_size=2, seed=3, sampler=sampler)
            batches.epoch = epoch
            ranks.append(list(batches))
        order = sampler(3, epoch).tolist()
        assert [sorted(a + b) for a, b in zip(*ranks)] == [sorted(order[:4]), sorted(order[4:])]
    shard = alone().shard(TensorDataset(torch.arange(4)), batch_size=4, shuffle_seed=3, sampler=sampler)
    assert (shard.size, len(shard)) == (6, 2)
    assert torch.cat([batch for (batch,) in shard]).tolist() == sampler(3, 0).tolist()


def test_a_sampler_that_changes_its_mind_is_an_error() -> None:
    shard = alone().shard(TensorDataset(torch.arange(4)), batch_size=2, sampler=lambda seed, epoch: range(4 - epoch))
    assert len(list(shard)) == 2
    shard.set_epoch(1)
    with pytest.raises(DataError, match=r"shape \(3,\), and 4 indices for epoch 0"):
        list(shard)


def test_the_last_batch_can_be_dropped() -> None:
    shard = alone().shard(TensorDataset(torch.arange(7)), batch_size=3, drop_last=True)
    assert [batch.tolist() for (batch,) in shard] == [[0, 1, 2], [3, 4, 5]]
    assert shard.seen == shard.size == 6 and len(shard) == 2
    shuffled = alone().shard(TensorDataset(torch.arange(7)), batch_size=3, drop_last=True, shuffle_seed=1)
    left_out = []
    for epoch in range(20):
        shuffled.set_epoch(epoch)
        left_out += set(range(7)) - {int(sample) for (batch,) in shuffled for sample in batch}
    assert len(left_out) == 20 and len(set(left_out)) > 3  # others in each epoch
    with pytest.raises(DataError, match="there are only 7 samples"):
        alone().shard(TensorDataset(torch.arange(7)), batch_size=8, drop_last=True)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (
            Stream(),
            {},
            "can't be shared or resumed.\n  Hint: world.stream(dataset, batch_size=…)",
        ),
        (TensorDataset(torch.arange(4)), {"sampler": RandomSampler(range(4))}, "sampler=lambda seed, epoch: indices"),
        (TensorDataset(torch.arange(4)), {"shuffle": True}, "shuffle_seed=1) shuffles each epoch anew"),
        (TensorDataset(torch.arange(4)), {"batch_sampler": []}, "sampler=lambda seed, epoch: indices"),
        (TensorDataset(torch.arange(4)), {"num_worker": 2}, "Did you mean num_workers?"),
    ],
)
def test_what_cannot_be_shared_is_a_short_error(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterDDPError) as caught:
        alone().shard(dataset, batch_size=2, **options)
    assert words in str(caught.value)


class FakeStream:
    """Stands in for a CUDA stream: notes what it is asked."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        self.asked.append(f"wait for the {event}")


def _streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace CUDA's streams. Returns what they are asked, in order."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(asked))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(asked))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: asked.append("record"))
    return asked


@pytest.mark.parametrize("ahead", [True, False])
def test_a_gpus_next_batch_is_copied_while_this_one_is_used(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """But not where its random numbers would be drawn in this process, before those of this step."""
    asked = _streams(monkeypatch)

    def batches() -> Iterator[tuple[torch.Tensor, str]]:
        for number in range(3):
            asked.append(f"make {number}")
            yield torch.tensor(number), "label"

    for batch, label in data_loader.copied(batches(), torch.device("meta"), ahead=ahead):
        assert batch.device.type == "meta" and label == "label"
        asked.append("use")
    handed = ["wait for the event", "record", "use"]
    if ahead:
        assert asked == ["make 0", "make 1", *handed, "make 2", *handed, *handed]
    else:
        assert asked == ["make 0", "use", "make 1", "use", "make 2", "use"]


def test_samples_per_second_are_those_of_this_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(batch_iterator, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shard = shard_of(20, ranks(20, 2, 2)[0])
    assert shard.samples_per_s == 0
    shard.resume(0, step=2, seen=8)
    found = []
    for _ in shard:
        now[0] += 2
        found.append(shard.samples_per_s)
    assert found == [2.0] * 3  # two ranks with two samples each, in two seconds


def test_batches_of_any_form_are_moved() -> None:
    Pair = namedtuple("Pair", "a b")
    batch = {"x": [torch.zeros(1), (torch.ones(1), "text")], "y": Pair(torch.ones(2), 3)}
    found = data_loader.moved(batch, torch.device("meta"))
    assert found["x"][0].device.type == found["x"][1][0].device.type == found["y"].a.device.type == "meta"
    assert (found["x"][1][1], found["y"].b) == ("text", 3) and type(found["y"]) is Pair


@pytest.mark.parametrize("ahead", [False, True])
def test_what_has_a_to_of_its_own_moves_itself_in_the_trainings_stream(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A PackedSequence is a named tuple whose batch_sizes stay on the CPU; a BatchEncoding is a mapping."""
    asked = _streams(monkeypatch)

    class Encoding(UserDict[str, torch.Tensor]):
        def to(self, device: torch.device) -> Encoding:
            asked.append("moved")
            return Encoding({name: tensor.to(device) for name, tensor in self.items()})

    def batches() -> Iterator[Any]:
        yield {"text": Encoding(ids=torch.zeros(2)), "packed": pack_sequence([torch.ones(2), torch.ones(1)])}
        asked.append("end")

    (batch,) = data_loader.copied(batches(), torch.device("meta"), ahead=ahead)
    assert type(batch["text"]) is Encoding and batch["text"]["ids"].device.type == "meta"
    assert isinstance(batch["packed"], PackedSequence)
    assert (batch["packed"].data.device.type, batch["packed"].batch_sizes.device.type) == ("meta", "cpu")
    assert asked == (["end", "wait for the event", "moved"] if ahead else ["moved", "end"])


@pytest.mark.parametrize(("options", "said"), [({}, 0), ({"shuffle_seed": 1}, 1)])
def test_an_order_that_repeats_as_no_epoch_is_set_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture, options: dict[str, int], said: int
) -> None:
    """Without a Checkpointer. What is not shuffled may be for an evaluation."""
    shard = world.shard(TensorDataset(torch.arange(6)), batch_size=2, **options)
    for _ in range(3):
        list(shard)
    assert caplog.text.count("The second pass over a shard has the order of the first") == said
    other = world.shard(TensorDataset(torch.arange(6)), batch_size=2, **options)
    for epoch in range(3):
        other.set_epoch(epoch)
        list(other)
    assert caplog.text.count("The second pass over a shard") == said
