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
    total = sum(shard.mean_batch(step) * 4 for step in range(len(shard)))
    assert total == 103
    assert shard.samples_seen(len(shard) - 1) == 103


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
