"""What a run has cost: by a run directory made by hand, whose figures were added up by hand, too."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_lines

from cluster_ddp.jobs.report import cost
from cluster_ddp.jobs.report.cost import Cost
from cluster_ddp.jobs.status import RunStatus

OF_JOB = {"job": "12"}
START = {**OF_JOB, "event": "start", "requeue": 0, "training": 2, "gpus": 4}
# Two nodes with four GPUs each train, and a third one is spare. node1 is lost at 2000 s, and given back; the spare
# takes its place. At 3000 s the batch host dies without a word: node2's last sample is from then. The job is requeued.
ALLOCATIONS = (
    {**START, "time": 1020, "since": 1000, "start": 0, "id": 70, "nodes": 3},
    {**OF_JOB, "event": "end", "time": 2000, "start": 0, "state": "FAILED", "status": 1, "saved": 1700},
    {**OF_JOB, "event": "nodes", "time": 2005, "nodes": 2},
    {**START, "time": 2010, "start": 1, "id": 71, "nodes": 2},
    {**START, "time": 5000, "requeue": 1, "start": 2, "id": 72, "nodes": 3},
    {**OF_JOB, "event": "end", "time": 6100, "start": 2, "state": "COMPLETED", "status": 0, "saved": 6090},
    {**OF_JOB, "event": "over", "time": 6110, "saved": 6090},
)
# `lost_s` of the second one counts to when it was last seen; the agent, which saw it fail, knows better.
STARTS = (
    {"kind": "start", "time": 1100, "restart": 0, "start_id": 70, "step": 0, "ranks": 8},
    {"kind": "start", "time": 2060, "restart": 1, "start_id": 71, "step": 600, "ranks": 8, "lost_s": 280},
    {"kind": "start", "time": 5100, "restart": 2, "start_id": 72, "step": 1200, "ranks": 8, "lost_s": 250},
    {"kind": "end", "time": 6095, "state": "COMPLETED", "saved": True},
)
STEPS = {"kind": "steps", "steps": 100, "step_s": 1.0, "checkpoint_s": 0.1}
# In GPU seconds. All: 3 nodes for 1005 s, 2 for 995 s, 3 for 1110 s. Lost before the training began: 100 s, 60 s and
# 100 s, of two nodes; in steps: 300 s since the checkpoint at 1700, and 250 s; by a spare node: 1005 s and 1110 s; in
# saves: twice 100 steps of 0.1 s.
ALL, BEGINS, STEPPED, WAITED, SAVING = 33_340, 8 * 260, 8 * 550, 4 * 2115, 8 * 20
LOST = BEGINS + STEPPED + WAITED + SAVING


def read(run_dir: Path, *, job: str = "", **said: Any) -> Cost:
    """Its cost, by what Slurm says of its last job."""
    status = RunStatus(run_dir=run_dir, name="fit", job=job, **{"state": "unknown", **said})
    return cost.read(status)


def sample(at: float, *gpus: Mapping[str, float], node: str = "node2") -> dict[str, Any]:
    return {
        "time": at,
        "node": node,
        "seconds": 10.0,
        "cpus": 8,
        "cpu": 0.5,
        "gpus": [*gpus],
        "restart": 0,
        "start_id": 71,
    }


def make(
    folder: Path,
    *,
    allocations: Sequence[Mapping[str, Any]] = ALLOCATIONS,
    starts: Sequence[Mapping[str, Any]] = STARTS,
    steps: Sequence[Mapping[str, Any]] = (STEPS, STEPS),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "job.jsonl", [*allocations])
    write_lines(folder / "starts.jsonl", [*starts])
    write_lines(folder / "metrics.jsonl", [*steps])
    write_lines(folder / "usage-0.jsonl", [sample(2990), sample(3000)])
    return folder


def seconds(found: Cost) -> tuple[int | None, int | None]:
    """Had, and lost."""
    had, lost = (None if hours is None else round(3600 * hours) for hours in (found.gpu_hours, found.lost_gpu_hours))
    return had, lost


def test_the_gpu_hours_of_two_allocations_with_a_failure_and_a_spare(tmp_path: Path) -> None:
    found = read(make(tmp_path), job="12", state="COMPLETED", elapsed="00:18:30", requeues=1)
    assert seconds(found) == (ALL, LOST)
    assert found.kept_gpu_hours == pytest.approx((33_340 - 2080 - 4400 - 8460 - 160) / 3600)
    assert found.kept == pytest.approx(18_240 / 33_340)
    assert found.line == "Cost: 9.26 GPU hours, 5.07 kept (4.19 lost, most by nodes that waited)"
    assert [bar[2] for bar in found.bars] == ["of 9.26 kept; 4.19 lost, most by nodes that waited"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # A script that does not use cluster_ddp: only what it had is known.
        ({"starts": (), "steps": ()}, (ALL, None)),
        # The agent saw the end of a training that had just saved.
        (
            {"starts": (STARTS[0], {"kind": "end", "time": 1990, "saved": True}, *STARTS[1:])},
            (ALL, LOST - 8 * 300),
        ),
        # Nobody saw the second one die: how much it lost is not known.
        (
            {"starts": (*STARTS[:2], {**STARTS[2], "lost_s": None})},
            (ALL, None),
        ),
        # The ranks of the second start never met: all its time is lost.
        ({"starts": (STARTS[0], STARTS[2])}, (ALL, 8 * 1200 + 8 * 300 + WAITED + SAVING)),
        # No GPUs, or no record at all.
        ({"allocations": [{**one, "gpus": None} for one in ALLOCATIONS]}, (None, None)),
        ({"allocations": ()}, (None, None)),
        # Nothing says when the first allocation ended.
        ({"allocations": [{**one, "id": 9} for one in ALLOCATIONS]}, (None, None)),
    ],
)
def test_what_is_not_known_is_missing(tmp_path: Path, changes: dict[str, Any], expected: tuple[Any, Any]) -> None:
    found = read(make(tmp_path, **changes))
    assert seconds(found) == expected
    assert (found.kept_gpu_hours is None) == (expected[1] is None)
    assert ("kept" in found.line) == (found.kept_gpu_hours is not None) and bool(found.line) == bool(expected[0])


@pytest.mark.parametrize(
    ("now", "seconds_had", "of_steps"),
    [
        # An hour ago, it began. It is alive: nothing since its checkpoint is lost yet.
        ({"job": "12", "state": "RUNNING", "elapsed": "01:00:00", "requeues": 1}, 3600, 0),
        # Slurm has killed it, and knows how long it ran. The newest checkpoint is 600 s old then.
        ({"job": "12", "state": "TIMEOUT", "elapsed": "00:50:00", "requeues": 1}, 3000, 600),
        # Slurm speaks of another start, or has forgotten it: the last sign of life counts.
        ({"job": "12", "state": "RUNNING", "elapsed": "00:00:01", "requeues": 2}, 2500, 100),
        ({"job": "12"}, 2500, 100),
    ],
)
def test_an_allocation_whose_end_nobody_has_noted(
    tmp_path: Path, now: dict[str, Any], seconds_had: int, of_steps: int
) -> None:
    began = time.time() - 3600
    run_dir = make(
        tmp_path, allocations=[{**ALLOCATIONS[4], "time": began, "id": 71}], starts=[{**STARTS[1], "time": began + 100}]
    )
    write_lines(run_dir / "usage-0.jsonl", [sample(began + 2500)])
    (run_dir / ".progress").write_text("step-9.pt")
    os.utime(run_dir / ".progress", (began + 2400, began + 2400))
    found = seconds(read(run_dir, **now))
    assert found[0] == pytest.approx(12 * seconds_had, abs=60)
    assert found[1] == pytest.approx(8 * (100 + of_steps) + 4 * seconds_had + SAVING, abs=60)


def test_a_clock_that_was_set_back_takes_nothing_from_the_sum(tmp_path: Path) -> None:
    began, over = ALLOCATIONS[4], ALLOCATIONS[6]
    first = [{**began, "requeue": 0, "time": 1000}, {**over, "time": 1100}]
    back = [{**began, "time": 1050}, {**over, "time": 1000}]
    found = seconds(read(make(tmp_path, allocations=[*first, *back], starts=())))
    assert found == (12 * 100, None)


def test_the_time_for_reading_does_not_grow_with_the_square_of_the_records(tmp_path: Path) -> None:
    """Others may have written them. And each start whose end is not noted looks for its last sign of life."""
    numbers = range(3000)
    began = {**START, "nodes": 3, "start": 0}
    allocations = [{**began, "time": 1000 + at, "requeue": at // 2, "id": at} for at in numbers]
    starts = [{**STARTS[0], "time": 1000 + at, "start_id": at} for at in numbers]
    run_dir = make(tmp_path, allocations=allocations, starts=starts)
    write_lines(run_dir / "usage-0.jsonl", [{**sample(1000 + at), "start_id": at} for at in numbers])
    began = time.process_time()
    assert seconds(read(run_dir))[0] == 12 * 1500
    assert time.process_time() - began < 2


JOULES = {"energy_j": 1.8e6}


@pytest.mark.parametrize(
    ("samples", "kwh", "by_node"),
    [
        # By the counter; by the mean power of ten seconds where that is not known.
        (([JOULES, JOULES], [{"power_w": 300.0}, JOULES]), (3 * 1.8e6 + 3000) / 3.6e6, 1.500833),
        (([{"power_w": 360.0}],), 0.001, 0.001),
        # One of the GPUs told neither, once.
        (([JOULES, JOULES], [JOULES, {}]), None, None),
        (([],), None, None),
    ],
)
def test_the_energy_of_the_gpus(
    tmp_path: Path, samples: Sequence[list[dict[str, float]]], kwh: float | None, by_node: float | None
) -> None:
    run_dir = make(tmp_path, allocations=())
    write_lines(run_dir / "usage-0.jsonl", [sample(10.0 * at, *gpus) for at, gpus in enumerate(samples)])
    found = read(run_dir)
    assert found.energy_kwh == (None if kwh is None else pytest.approx(kwh))
    assert found.energy_kwh_by_node == ({} if by_node is None else {"node2": pytest.approx(by_node)})
    assert ("Energy" in [bar[0] for bar in found.bars]) == (kwh is not None)


def test_energy_by_node_and_in_all_in_words(tmp_path: Path) -> None:
    run_dir = make(tmp_path, allocations=())
    write_lines(run_dir / "usage-0.jsonl", [sample(10, {**JOULES, "shared": 1.0})])
    write_lines(run_dir / "usage-1.jsonl", [sample(10, JOULES, JOULES, node="node10")])
    words = "1.5 kWh of the GPUs alone (node2 0.5, node10 1). Others used these GPUs, too"
    assert read(run_dir).line == f"Cost: {words}"
    write_lines(run_dir / "usage-2.jsonl", [sample(10, {}, node="node11")])
    assert read(run_dir).line == "Cost: energy not measured on all nodes", "that of a node is not known"


def test_energy_is_not_measured_if_a_node_was_not_sampled_in_a_start(tmp_path: Path) -> None:
    """Nobody was sampled in the first start; in the last one node2, and in the one between both nodes were."""
    run_dir = make(tmp_path)
    both = [{**sample(2100, JOULES, node=node), "start_id": 71} for node in ("node2", "node3")]
    write_lines(run_dir / "usage-0.jsonl", both[:1])
    write_lines(run_dir / "usage-1.jsonl", both[1:])
    assert read(run_dir).energy_kwh == 1.0
    write_lines(run_dir / "usage-0.jsonl", [*both[:1], {**sample(5200, JOULES), "start_id": 72}])
    found = read(run_dir)
    assert (found.energy_kwh, found.energy_words) == (None, "not measured on all nodes")


def test_the_sum_of_several(tmp_path: Path) -> None:
    one = read(make(tmp_path / "a"))
    other = dataclasses.replace(
        one, gpu_hours=None, kept_gpu_hours=None, lost_gpu_hours=1.0, most_lost="", energy_kwh=2.0
    )
    found = cost.total([one, other, Cost()])
    assert (found.gpu_hours, found.kept_gpu_hours, found.energy_kwh) == (one.gpu_hours, one.kept_gpu_hours, 2.0)
    assert found.lost_gpu_hours == one.lost_gpu_hours + 1 and one.most_lost and not found.most_lost
    assert cost.total([]) == Cost() and json.dumps(dataclasses.asdict(found))
