"""Datasets of tensors; their loader is tested in test_loader.py."""

from __future__ import annotations

import pytest
import torch

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.data.device_dataset import ResidentSet


@pytest.mark.parametrize(
    ("sizes", "found"), [((), "there is none"), ((3, 4), r"they have \[3, 4\] samples")], ids=["none", "unequal"]
)
def test_tensors_that_are_no_dataset(sizes: tuple[int, ...], found: str) -> None:
    with pytest.raises(DataError, match=found):
        ResidentSet(*(torch.zeros(size) for size in sizes))
