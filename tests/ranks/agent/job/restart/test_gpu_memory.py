"""A GPU whose memory is too small: with `global_batch`, the next start has batches half as large, and equal updates.

The CPU stands in: the model raises the error that a GPU's allocator raises, for batches of more samples than fit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from local_launch import launch

from cluster_ddp.run import journal
from cluster_ddp.run.files import json_lines
from cluster_ddp.run.names import File, Kind

TRAINING = Path(__file__).parents[4] / "helpers" / "large_batches.py"


def run(folder: Path, fits: int, form: str, run_dir: str = "run", restarts: int = 1) -> tuple[int, str]:
    options = ("--run-dir", run_dir, "--restarts", str(restarts))
    return launch(folder, *options, "--", sys.executable, str(TRAINING), str(fits), form)


def rank_0s(run_dir: Path) -> str:
    """What it has said."""
    return (run_dir / File.TASK_LOG.format(0)).read_text()


def weights(run_dir: Path) -> list[float]:
    return next(one["weights"] for one in json_lines(run_dir / File.METRICS) if one["kind"] == "weights")


def test_batches_are_halved_until_they_fit_and_updates_stay(tmp_path: Path) -> None:
    """More often than --restarts allows: these restarts count towards nothing."""
    status, said = run(tmp_path, 5, "global_batch")
    assert status == 0, said
    assert "Micro-batches have at most 8 samples now." in said and "Micro-batches have at most 4 samples now." in said
    assert rank_0s(tmp_path / "run").count("Micro-batches of 4 samples in place of 16: 4 per update.") == 1
    assert [one.kind for one in journal.failures(tmp_path / "run")] == [Kind.GPU_MEMORY] * 2
    status, said = run(tmp_path, 99, "global_batch", "undisturbed")
    assert (status, "Micro-batches" in said + rank_0s(tmp_path / "undisturbed")) == (0, False), said
    assert weights(tmp_path / "run") == pytest.approx(weights(tmp_path / "undisturbed"), rel=1e-12)


@pytest.mark.parametrize("form", ["batch_size", "evaluates"])
def test_batches_that_cannot_be_halved_end_the_job_at_once(tmp_path: Path, form: str) -> None:
    """An update of one batch of each rank; and a batch of no update, such as of an evaluation."""
    status, said = run(tmp_path, 15 if form == "batch_size" else 16, form, restarts=3)
    assert status == 1 and said.count("error: the memory of a GPU is too small") == 1, said
    assert "Hint: world.shard(…, global_batch=N) and world.accumulate" in said
    assert len(journal.starts(tmp_path / "run")) == 1


@pytest.mark.full
def test_a_later_job_of_the_run_begins_with_batches_that_fit(tmp_path: Path) -> None:
    status, said = run(tmp_path, 8, "fails")
    assert status == 1 and "failed twice (--restarts 1)" in said, said
    before = len(journal.starts(tmp_path / "run"))
    status, said = run(tmp_path, 8, "global_batch")
    assert status == 0, said
    assert "Micro-batches of 8 samples in place of 16: 2 per update." in rank_0s(tmp_path / "run")
    assert (before, len(journal.starts(tmp_path / "run"))) == (3, 4)
