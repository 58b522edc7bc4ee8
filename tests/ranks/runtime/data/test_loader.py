"""How `World.shard` chooses between memory and torch's DataLoader, and the loader's defaults."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.data.data_loader import Loader, keep_through_stops, with_defaults
from cluster_ddp.runtime.data.device_dataset import DeviceLoader, ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Derived(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + 1


def world(device: torch.device = CPU) -> World:
    return World(topology=Topology.from_environ({}), device=device)


@pytest.mark.parametrize(
    ("dataset", "options", "source"),
    [
        (TensorDataset(torch.arange(4)), {}, DeviceLoader),
        (ResidentSet(torch.arange(4)), {}, DeviceLoader),
        (Derived(torch.arange(4)), {}, Loader),  # it may do anything with them
        (TensorDataset(torch.arange(4)), {"num_workers": 0}, Loader),
    ],
)
def test_what_is_tensors_is_gathered(dataset: Dataset[Any], options: dict[str, Any], source: type) -> None:
    shard = world().shard(dataset, batch_size=2, **options)
    assert isinstance(shard._source, source)
    first = 1 if isinstance(dataset, Derived) else 0
    assert torch.cat([batch if isinstance(batch, torch.Tensor) else batch[0] for batch in shard]).tolist() == list(
        range(first, first + 4)
    )


@pytest.mark.parametrize(
    ("free", "options", "fits"),
    [
        (320, {}, True),  # a tenth; what the model needs comes later
        (319, {}, False),
        (64, {"resident_share": 0.5}, True),
        (10**9, {"resident_share": 0}, False),
    ],
)
def test_on_a_gpu_it_must_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, options: dict[str, float], fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(ResidentSet, "to", lambda self, device: self)
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "level", logging.INFO)
    shard = world(GPU).shard(ResidentSet(torch.arange(4)), batch_size=2, **options)
    assert isinstance(shard._source, DeviceLoader) == fits
    assert ("stays in the host's memory" in caplog.text) != fits


def test_a_resident_set_that_does_not_fit_goes_through_the_loader_whole_batches_at_a_time() -> None:
    batches = DistributedBatchSampler(5, 2, rank=0, world_size=1, seed=None)
    dataset = ResidentSet(torch.arange(5), transform=lambda numbers: (numbers, -numbers))
    found = [[part.tolist() for part in batch] for batch in Loader(dataset, batches, device=CPU, cpus=1)]
    assert found == [[[0, 1], [0, -1]], [[2, 3], [-2, -3]], [[4], [-4]]]


@pytest.mark.parametrize(
    ("device", "cpus", "given", "workers"),
    [(CPU, 8, {}, 0), (GPU, 1, {}, 0), (GPU, 5, {}, 4), (GPU, 64, {}, 8), (GPU, 64, {"num_workers": 2}, 2)],
)
def test_workers_follow_from_the_cpus(device: torch.device, cpus: int, given: dict[str, int], workers: int) -> None:
    batches = DistributedBatchSampler(4, 2, rank=0, world_size=1, seed=None)
    loader = Loader(TensorDataset(torch.arange(4)), batches, device=device, cpus=cpus, **given)._loader
    assert (loader.num_workers, loader.persistent_workers) == (workers, False)
    assert loader.pin_memory == (device is GPU)


class Levels(Dataset[int]):
    """With a level, as of a curriculum."""

    level: Any = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.level)


@pytest.mark.parametrize(("workers", "kind"), [(0, int), (1, int), (1, torch.tensor)])
def test_workers_that_are_kept_see_the_level_that_the_script_sets(workers: int, kind: Callable[[int], Any]) -> None:
    levels = Levels()
    levels.own = levels
    shard = world().shard(Subset(levels, range(4)), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    seen = []
    for epoch in range(4):
        levels.level = kind(epoch // 2)
        seen += [batch.tolist() for batch in shard]
    assert seen == [[0, 0]] * 4 + [[1, 1]] * 4


class ReadsAnObject(Levels):
    """Has its level in an object that the script has, too."""

    def __init__(self) -> None:
        self.kept = SimpleNamespace(levels=torch.zeros(1, dtype=torch.int64))

    def __getitem__(self, index: int) -> int:
        return int(self.kept.levels)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_see_in_each_epoch_what_the_loop_has_changed(workers: int) -> None:
    data = ReadsAnObject()
    shard = world().shard(data, batch_size=2, num_workers=workers)
    seen = []
    for epoch in range(3):
        data.kept.levels += epoch
        seen += [batch.tolist() for batch in shard]
    assert seen == [[0, 0]] * 2 + [[1, 1]] * 2 + [[3, 3]] * 2


COUNTS = """
import torch
from torch.utils.data import Dataset

import cluster_ddp

class Numbers(Dataset):
    read = 0
    def __init__(self, counts):
        self.counts, self.read = counts, 0
    def __len__(self):
        return 8
    def __getitem__(self, index):
        self.read += self.counts
        return index

class Collate:
    def __init__(self, counts):
        self.counts, self.batches = counts, 0
    def __call__(self, samples):
        self.batches += self.counts
        return torch.tensor(samples)

if __name__ == "__main__":
    with cluster_ddp.distributed(cuda=False) as world:
        for of_data, of_collate in ((1, 0), (0, 1), (0, 0)):
            data = Numbers(of_data)
            shard = world.shard(data, batch_size=2, num_workers=2, collate_fn=Collate(of_collate))
            data.level = data.read = 3  # by the script
            print(len(list(shard)))
"""


def test_a_count_in_a_worker_is_named(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    done = subprocess.run([sys.executable, "counts.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n4\n4\n"
    assert re.findall(r"a worker changes (\S+), which no checkpoint has", done.stderr) == [
        "dataset.read",
        "collate_fn.batches",
    ]


def test_a_forked_worker_destroys_nothing_that_it_has_inherited(tmp_path: Path) -> None:
    """Such as the process group of an earlier training, whose threads it lacks."""
    keep_through_stops()
    destroyed = tmp_path / "destroyed"

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            destroyed.write_text(str(os.getpid()))

    gc.disable()
    try:
        Garbage()
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
    finally:
        gc.enable()
    assert not destroyed.exists()
    gc.collect()
    assert destroyed.read_text() == str(os.getpid())


@pytest.mark.parametrize("is_gpu", [False, True])
def test_memory_is_pinned_for_a_gpu_unless_the_user_says_otherwise(is_gpu: bool) -> None:
    defaults, own = dict[str, Any](), {"pin_memory": not is_gpu}
    for options in (defaults, own):
        with_defaults(options, workers=0, is_gpu=is_gpu)
    assert (defaults["pin_memory"], own["pin_memory"]) == (is_gpu, not is_gpu)


def test_a_folder_for_temporary_files_that_is_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's workers pass their tensors over a socket in it: each would fail, and the rank wait for it."""
    keep_through_stops()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(DataError, match=r"too long by \d+ bytes for a socket") as error:
        next(iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=1)))
    assert error.value.hint == "export TMPDIR=/tmp in the batch script"
