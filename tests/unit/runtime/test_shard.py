"""Every sample once, equal steps, whatever the world size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.shard import GlobalBatches, Shard, stream_seed


def ranks(size: int, batch_size: int, world_size: int, seed: int | None = 3) -> list[GlobalBatches]:
    return [GlobalBatches(size, batch_size, rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)]


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
    shard = Shard(list(range(103)), ranks(103, 10, 4)[0])  # type: ignore[arg-type]
    total = sum(shard.mean_batch * 4 for _ in shard)
    assert total == shard.seen == 103
    assert shard.step == len(shard) - 1


@given(st.integers(12, 400), st.integers(1, 6), st.integers(0, 30))
def test_going_on_in_the_middle_of_an_epoch_is_the_rest_of_it(size: int, batch_size: int, step: int) -> None:
    def shard() -> Shard:
        return Shard(list(range(size)), ranks(size, batch_size, 3)[1], collate_fn=list)  # type: ignore[arg-type]

    whole = [(one.step, one.seen, one.mean_batch, batch) for one in [shard()] for batch in one]
    done = min(step, len(whole))
    later = shard()
    later.resume(0, step=done, seen=whole[done - 1][1] if done else 0)
    later.set_epoch(0)  # the same epoch: no new beginning
    assert [(later.step, later.seen, later.mean_batch, batch) for batch in later] == whole[done:]


def test_another_number_of_ranks_sees_the_rest_and_nothing_twice() -> None:
    first, seen = [], 0
    for shard in (Shard(list(range(100)), batches, collate_fn=list) for batches in ranks(100, 4, 4)):  # type: ignore[arg-type]
        for batch in shard:
            first += batch
            if shard.step == 2:
                break
        seen = shard.seen
    rest = []
    for batches in ranks(100, 4, 3):
        shard = Shard(list(range(100)), batches, collate_fn=list)  # type: ignore[arg-type]
        shard.resume(0, step=3, seen=seen)
        rest += [index for batch in shard for index in batch]
    assert sorted(first + rest) == list(range(100))


def test_too_few_samples_for_a_new_number_of_ranks() -> None:
    shard = Shard(list(range(100)), ranks(100, 1, 8)[0])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at most 3 GPUs"):
        shard.resume(0, step=97, seen=97)


def test_a_shard_is_a_loader() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    batches = GlobalBatches(10, 2, rank=1, world_size=2, seed=None)
    loaded = [batch[0].tolist() for batch in Shard(dataset, batches)]
    assert loaded == [[1, 3], [5, 7], [9]]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="--batch-size"):
        ranks(10, 0, 1)


@given(st.integers(0, 2**32), st.integers(0, 10_000))
def test_neighbouring_streams_have_different_seeds(seed: int, stream: int) -> None:
    neighbours = {stream_seed(seed + i, stream + j) for i in range(3) for j in range(3)}
    assert len(neighbours) == 9
    assert all(0 <= value < 2**63 for value in neighbours)
