"""What the records of a run say of its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster_ddp.jobs.report import page, training_stats
from cluster_ddp.jobs.report.report_text import as_text, notes
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import RunStatus

STEPS = {"kind": "steps", "steps": 10, "step_s": 0.2, "data_s": 0.05, "compute_s": 0.15, "progress": 0.25}
RANKS = {"rank_s_min": 0.1, "rank_s_max": 0.2, "slowest_rank": 3}
STARTS = [
    {"kind": "start", "time": 1e9, "restart": 0, "step": 0, "ranks": 4},
    {"kind": "end", "time": 1e9 + 1, "why": "x", "saved": True},
    {"kind": "start", "time": 1e9 + 60, "restart": 1, "step": 9, "ranks": 1, "cause": "Killed.", "lost_s": 70.0},
    {"kind": "start", "time": 1e9 + 90, "restart": 2, "step": 9, "ranks": 1, "cause": "Stopped.", "lost_s": 0.0},
]


def write(folder: Path, records: list[Any], starts: list[Any] | None = None) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts or []))


def test_means_over_all_steps(tmp_path: Path) -> None:
    longer = {**STEPS, "steps": 30, "step_s": 0.4, "data_s": 0.25, "progress": 1.0, "checkpoint_s": 0.01}
    write(tmp_path, [STEPS | RANKS, {"kind": "train", "waiting_for_data": 0.9}, longer | RANKS])
    found = training_stats.read(tmp_path)
    assert found.step_s == 0.35 and found.parts == {"data_s": 0.2, "compute_s": 0.15, "checkpoint_s": 0.01}
    assert (found.slowest, found.slowest_rank, found.progress) == (2.0, 3, 1.0)
    assert found.waiting_for_data == 0.2 / 0.35


def test_communication_that_nobody_measured_is_said_so(tmp_path: Path) -> None:
    """Not 0, and no note hangs on it."""
    write(tmp_path, [STEPS], STARTS)
    found = report(RunStatus(job="12", name="fit", state="RUNNING", run_dir=tmp_path))
    assert "\n  Step: 200 ms: data 25 %, compute 75 %, communication not measured\n" in as_text(found)
    assert "<span>communication not measured</span>" in page.page([found])
    write(tmp_path, [STEPS], STARTS[2:])  # one rank alone
    assert not training_stats.read(tmp_path).lacks_communication


def test_without_records_of_steps_those_of_training_say_how_long_it_waited(tmp_path: Path) -> None:
    write(tmp_path, [{"kind": "train", "waiting_for_data": 0.3}, {"kind": "steps", "steps": 0, "step_s": "x"}, {}])
    assert training_stats.read(tmp_path) == training_stats.TrainingStats(waiting_for_data=0.3, starts=[])
    assert training_stats.read(tmp_path / "missing") == training_stats.TrainingStats(starts=[])


def test_its_restarts_and_its_slow_rank_are_in_the_report(tmp_path: Path) -> None:
    write(tmp_path, [{**STEPS, **RANKS, "communication_s": 0.08}], [*STARTS, {"kind": "start"}])
    (tmp_path / "spec.json").write_text(json.dumps({"spec": {"nodes": 2, "gpus_per_node": 2, "gpus_per_task": 1}}))
    for number in range(2):
        use = {"node": f"n{number}", "seconds": 100, "cpus": 4, "cpu": 0.5, "gpus": []}
        (tmp_path / f"usage-{number}.jsonl").write_text(json.dumps(use) + "\n")
    found = report(RunStatus(job="12", name="fit", state="RUNNING", run_dir=tmp_path))
    text = as_text(found)
    assert "\n  Step: 200 ms: data 25 %, compute 75 %, communication 40 %\n" in text
    assert "not measured" not in text
    starts = text.partition("  Starts:\n")[2].splitlines()[:3]
    assert [line.partition(" from ")[2] for line in starts] == [
        "step 0, 4 ranks.",
        "step 9, 1 rank. The start before: Killed. Done again: 0:01:10.",
        "step 9, 1 rank. The start before: Stopped. Nothing was lost.",
    ]
    assert notes(found) == [
        "Ranks wait for data 25 % of the time. Give loader workers more CPUs: --cpus-per-task 2; or use fewer GPUs.",
        "Communication takes 40 % of a step. Use larger batches, add up gradients (world.accumulate), or use fewer "
        "GPUs: cluster-ddp scaling --gpus 1,2,4",
        "Rank 3 on n1 needs 2.0 times as long for a step as the fastest: all wait for it. If that is the node's fault: "
        "--exclude n1",
    ]


def test_a_rank_that_the_job_does_not_have_and_a_job_without_a_time_limit(tmp_path: Path) -> None:
    """Another program's record may name any rank."""
    write(tmp_path, [{**STEPS, **RANKS, "slowest_rank": 99}])
    (tmp_path / "spec.json").write_text(json.dumps({"spec": {"nodes": 1, "gpus_per_node": 2, "gpus_per_task": 1}}))
    use = {"node": "n1", "seconds": 100, "cpus": 4, "cpu": 0.5, "gpus": []}
    (tmp_path / "usage-0.jsonl").write_text(json.dumps(use) + "\n")
    found = report(RunStatus(job="12", name="fit", state="RUNNING", elapsed="00:01:30", run_dir=tmp_path))
    assert "Rank 99 needs 2.0 times as long for a step as the fastest: all wait for it." in notes(found)
    assert "<dt>Time</dt><dd>00:01:30</dd>" in page.page([found])
