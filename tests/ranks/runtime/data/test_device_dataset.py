"""Datasets of tensors; their loader is tested in test_loader.py."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.data.device_dataset import ResidentSet, fingerprint


class Named(Dataset[int]):
    def __init__(self, **names: object) -> None:
        self.__dict__.update(names)


def test_a_dataset_may_tell_its_own() -> None:
    assert fingerprint(Named(_fingerprint="abc")) == "abc"  # as Hugging Face's do
    assert fingerprint(Named(fingerprint="abc", _fingerprint="def")) == "abc"
    assert fingerprint(Named(fingerprint=lambda: "abc")) is None
    assert fingerprint(Named()) is None


def test_tensors_are_looked_at_in_places() -> None:
    images, labels = torch.arange(6000).view(1000, 2, 3), torch.arange(1000)
    found = fingerprint(TensorDataset(images, labels))
    assert found == fingerprint(ResidentSet(images.clone(), labels)) != fingerprint(TensorDataset(images))
    others = (images.flip(0), labels), (images, labels + 1), (images.float(), labels), (images[:999], labels[:999])
    assert found not in {fingerprint(TensorDataset(*other)) for other in others}
    assert fingerprint(TensorDataset(torch.empty(0, 3))) is not None
    assert fingerprint(TensorDataset(torch.empty(3, 0), torch.ones(3, dtype=torch.bfloat16))) is not None


def test_a_split_of_its_own_is_another_dataset() -> None:
    """random_split without a generator: a resume has another one."""
    data = TensorDataset(torch.arange(100.0))
    splits = [random_split(data, [60, 40], torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    one, same, other = (fingerprint(split[0]) for split in splits)
    assert one == same != other
    assert fingerprint(splits[0][1]) != one
    assert fingerprint(Subset(data, [])) is not None


@pytest.mark.parametrize(
    ("sizes", "found"), [((), "there is none"), ((3, 4), r"they have \[3, 4\] samples")], ids=["none", "unequal"]
)
def test_tensors_that_are_no_dataset(sizes: tuple[int, ...], found: str) -> None:
    with pytest.raises(DataError, match=found):
        ResidentSet(*(torch.zeros(size) for size in sizes))
