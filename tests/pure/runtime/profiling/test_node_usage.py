from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import stays, wait_until

from cluster_ddp.runtime.profiling import node_usage
from cluster_ddp.runtime.profiling.node_usage import Sampler
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

TOPOLOGY = Topology(
    launcher="single", rank=0, local_rank=0, world_size=1, node_rank=3, master_addr="localhost", port_candidates=(1,)
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_usage, "SAMPLE_S", 0.02)
    monkeypatch.setattr(node_usage, "WRITE_S", 0.1)


def records(run_dir: Path) -> list[dict]:
    path = run_dir / "usage-3.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_it_writes_until_it_is_stopped(tmp_path: Path) -> None:
    made = Sampler(tmp_path, TOPOLOGY, {"SLURM_CPUS_ON_NODE": "1"})
    # Busy, but without Python's global lock.
    wait_until(lambda: hashlib.sha256(bytes(1 << 22)) and len(records(tmp_path)) >= 2, pause_s=0)
    made.stop()
    count = len(records(tmp_path))
    assert count >= 2
    for record in records(tmp_path):
        assert (record["node"], record["cpus"], record["restart"], record["gpus"]) == (node_name({}), 1, 0, [])
        assert 0 <= record["cpu"] <= 1 and record["seconds"] > 0
    assert records(tmp_path)[0]["memory"] > 1 << 20
    assert max(record["cpu"] for record in records(tmp_path)) > 0.1
    stays(lambda: len(records(tmp_path)) == count, 0.3)
    assert (tmp_path / "usage-3.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread begins late."""
    monkeypatch.setattr(node_usage, "PATIENCE_S", 60.0)


def test_a_peak_of_memory_between_two_records_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1, 7, 2])
    source = SimpleNamespace(cpu_s=lambda: 0.0, memory_bytes=lambda: next(readings, 3) << 30)
    monkeypatch.setattr(node_usage, "_source", lambda env: source)
    clock = itertools.count()  # a second at each look: a record has several samples, also on a busy machine
    monkeypatch.setattr(node_usage, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), time=lambda: 0.0))
    monkeypatch.setattr(node_usage, "WRITE_S", 10.0)
    made = Sampler(tmp_path, TOPOLOGY, {})
    wait_until(lambda: records(tmp_path))
    made.stop()
    assert records(tmp_path)[0]["memory"] == 7 << 30


def test_a_record_has_the_energy_of_its_samples_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a sample lacks it, the power of the record is what is known."""
    of_second = iter([{"power_w": 9.0}])
    whole = {"power_w": 9.0, "energy_j": 6.25}
    samples = ([whole, next(of_second, whole)] for _ in iter(int, 1))
    gpus = SimpleNamespace(sample=lambda: next(samples), shared=lambda: [True, False])
    monkeypatch.setattr(node_usage, "_gpus", lambda env: gpus)
    made = Sampler(tmp_path, TOPOLOGY, {})
    sampled = lambda: [one["gpus"] for one in records(tmp_path) if one["gpus"]]  # noqa: E731
    wait_until(sampled)
    made.stop()
    first, second = sampled()[0]
    assert first == {"power_w": 9.0, "energy_j": first["energy_j"], "shared": 1.0}
    assert first["energy_j"] / 6.25 in range(1, 6) and second == {"power_w": 9.0}


def test_one_at_a_time(tmp_path: Path) -> None:
    """A process that makes many run directories, in a notebook, say, has one thread for them."""
    threads = threading.active_count()
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        node_usage.start(tmp_path / name, TOPOLOGY, {})
    assert threading.active_count() <= threads + 1
    assert len(records(tmp_path / "a")) == 1
    node_usage.stop()
    assert threading.active_count() <= threads


def test_a_short_training_has_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_usage, "WRITE_S", 60.0)
    Sampler(tmp_path, TOPOLOGY, {}).stop()
    (record,) = records(tmp_path)
    assert record["cpus"] == len(os.sched_getaffinity(0))


def test_one_of_less_than_a_second_does_not_look_at_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs 10 ms for each process with torch: much for a notebook that makes many run directories."""
    monkeypatch.setattr(node_usage, "SAMPLE_S", 60.0)
    Sampler(tmp_path, TOPOLOGY, {}).stop()
    (record,) = records(tmp_path)
    assert "memory" not in record


def test_a_folder_that_this_node_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Sampler(tmp_path / "elsewhere", TOPOLOGY, {}).stop()
    assert caplog.text == ""


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "usage-3.jsonl").mkdir()
    made = Sampler(tmp_path, TOPOLOGY, {})
    made.stop()
    assert caplog.text.count("How this node is used is no longer recorded.") == 1


def test_without_a_free_descriptor_a_record_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, left = node_usage.append, [OSError(errno.EMFILE, "Too many open files")]

    def append(*arguments: Any) -> None:
        if left:
            raise left.pop()
        real(*arguments)

    monkeypatch.setattr(node_usage, "append", append)
    made = Sampler(tmp_path, TOPOLOGY, {})
    wait_until(lambda: records(tmp_path))
    made.stop()
    assert records(tmp_path) and caplog.text == ""


def test_means_and_the_most_memory() -> None:
    samples = [[{"utilization": 0.0, "memory": 5.0}], [{"utilization": 1.0, "memory": 3.0, "power_w": 100.0}]]
    assert node_usage._means(samples) == [{"utilization": 0.5, "memory": 5.0, "power_w": 100.0}]
    assert node_usage._means([]) == []
