from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from cluster_ddp.jobs.report import training_stats
from cluster_ddp.scaling.points import Measured, measure


def record(run_dir: Path, *records: dict[str, object]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_the_median_without_the_first_record(tmp_path: Path) -> None:
    speeds = [10.0, 100.0, 300.0, 110.0]
    record(
        tmp_path,
        *({"kind": "train", "samples_per_s": speed, "waiting_for_data": speed / 1000} for speed in speeds),
        {"kind": "test", "samples_per_s": 1e9},
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "samples_per_s": 12')  # half written
    found = measure(tmp_path, seconds=7.0, metric=None)
    assert (found.samples_per_s, found.seconds) == (110.0, 7.0)
    assert found.waiting_for_data == pytest.approx(0.105)
    assert found.epoch_samples is None


def test_one_record_counts(tmp_path: Path) -> None:
    record(tmp_path, {"kind": "train", "samples_per_s": 10.0, "waiting_for_data": 0.0})
    found = measure(tmp_path, seconds=None, metric=None)
    assert (found.samples_per_s, found.waiting_for_data) == (10.0, 0.0)


def test_a_script_that_logs_nothing_has_records_of_its_steps(tmp_path: Path) -> None:
    steps = {"kind": "steps", "steps": 5, "step_s": 0.2, "data_s": 0.02, "communication_s": 0.05, "compute_s": 0.13}
    record(tmp_path, *({**steps, "samples_per_s": speed} for speed in (10.0, 30.0, 50.0)))
    found = measure(tmp_path, seconds=None, metric=None)
    assert (found.samples_per_s, found.waiting_for_data, found.communication) == (40.0, pytest.approx(0.1), 0.25)


def test_figures_that_are_not_finite_are_missing(tmp_path: Path) -> None:
    steps = {"kind": "steps", "steps": 5, "step_s": math.inf, "data_s": math.nan, "samples_per_s": math.inf}
    record(tmp_path, *({"kind": "train", "samples_per_s": speed} for speed in (1.0, math.inf, math.nan)), steps)
    found = measure(tmp_path, seconds=None, metric=None)
    assert found == Measured(samples_per_s=1.0, seconds=None)
    assert training_stats.read(tmp_path).parts == {}


def test_the_time_to_the_end_of_a_training(tmp_path: Path) -> None:
    """A run that was cut after a quarter of its steps: 10 + 20 steps took 9 s."""
    steps = {"kind": "steps", "samples_per_s": 1.0}
    before = {**steps, "steps": 10, "step_s": 0.3, "progress": 0.05}
    record(tmp_path, before, {**steps, "steps": 20, "step_s": 0.3, "progress": 0.25})
    assert measure(tmp_path, seconds=None, metric=None).training_s == pytest.approx(36.0)
    record(tmp_path, {**steps, "steps": 10, "step_s": 0.3})
    assert measure(tmp_path, seconds=None, metric=None).training_s is None


def test_the_samples_of_an_epoch_that_was_followed_by_another(tmp_path: Path) -> None:
    places = [(1, 500), (1, 1000), (2, 300)]
    record(tmp_path, *({"kind": "train", "epoch": epoch, "samples": samples} for epoch, samples in places))
    assert measure(tmp_path, seconds=None, metric=None).epoch_samples == 1000


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("", None),
        ("images/s: many\n", None),
        ("images/s: 5\nimages/s: inf\nimages/s: nan\nimages/s: 7\n", 7.0),
        ("images/s: 5\nimages/s: 1,200.5\nimages/s: 1,300.5\n", 1250.5),
    ],
)
def test_what_a_command_prints(tmp_path: Path, printed: str, found: float | None) -> None:
    (tmp_path / "task-0.log").write_text(printed)
    (tmp_path / "task-1.log").write_text("images/s: 7\n")
    assert measure(tmp_path, seconds=None, metric=re.compile("images/s: (.*)")).samples_per_s == found


def test_without_any_figure(tmp_path: Path) -> None:
    assert measure(tmp_path, seconds=3.0, metric=None).samples_per_s is None
