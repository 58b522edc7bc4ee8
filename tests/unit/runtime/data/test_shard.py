"""Every sample once, equal steps, whatever the world size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.data.loader import Loader
from cluster_ddp.runtime.data.resident import DeviceLoader, ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Shard
from cluster_ddp.runtime.seeds import stream_seed


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


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="--batch-size"):
        ranks(10, 0, 1)


@given(st.integers(0, 2**32), st.integers(0, 10_000))
def test_neighbouring_streams_have_different_seeds(seed: int, stream: int) -> None:
    neighbours = {stream_seed(seed + i, stream + j) for i in range(3) for j in range(3)}
    assert len(neighbours) == 9
    assert all(0 <= value < 2**63 for value in neighbours)
