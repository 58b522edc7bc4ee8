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

# Two nodes with four GPUs each train, and a third one is spare. node1 is lost at 2000 s, and given back; the spare
# takes its place. At 3000 s the batch host dies without a word: node2's last sample is from then. The job is requeued.
ALLOCATIONS = (
    {"kind": "start", "time": 1000, "job": "12", "requeue": 0, "start": 0, "nodes": 3, "training": 2, "gpus": 4},
    {"kind": "end", "time": 2000, "state": "FAILED", "saved": 1700},
    {"kind": "nodes", "time": 2005, "nodes": 2},
    {"kind": "start", "time": 2010, "job": "12", "requeue": 0, "start": 1, "nodes": 2, "training": 2, "gpus": 4},
    {"kind": "start", "time": 5000, "job": "12", "requeue": 1, "start": 2, "nodes": 3, "training": 2, "gpus": 4},
    {"kind": "end", "time": 6100, "state": "COMPLETED", "saved": 6090},
    {"kind": "over", "time": 6110, "saved": 6090},
)
# `lost_s` of the second one counts to when it was last seen; the agent, which saw it fail, knows better.
STARTS = (
    {"kind": "start", "time": 1100, "restart": 0, "step": 0, "ranks": 8},
    {"kind": "start", "time": 2060, "restart": 1, "step": 600, "ranks": 8, "lost_s": 280},
    {"kind": "start", "time": 5100, "restart": 2, "step": 1200, "ranks": 8, "lost_s": 250},
    {"kind": "end", "time": 6095, "state": "COMPLETED", "saved": True},
)
STEPS = {"kind": "steps", "steps": 100, "step_s": 1.0, "checkpoint_s": 0.1}
# In GPU seconds. All: 3 nodes for 1005 s, 2 for 995 s, 3 for 1110 s. Spares: 1 node for 1005 s and 1110 s.
# Starts: 100 s, 2000 to 2060 and 100 s, of two nodes. Steps: 300 s since the checkpoint at 1700, and 250 s.
# Saves: twice 100 steps of 0.1 s.
ALL, LOST = 33_340, {"starts": 8 * 260, "steps": 8 * 550, "spares": 4 * 2115, "saves": 8 * 20}


def read(run_dir: Path, *, job: str = "", co2_g_per_kwh: float | None = None, **said: Any) -> Cost:
    """Its cost, by what Slurm says of its last job."""
    status = RunStatus(run_dir=run_dir, name="fit", job=job, **{"state": "unknown", **said})
    return cost.read(status, co2_g_per_kwh=co2_g_per_kwh)


def sample(at: float, *gpus: Mapping[str, float], node: str = "node2") -> dict[str, Any]:
    return {"time": at, "node": node, "seconds": 10.0, "cpus": 8, "cpu": 0.5, "gpus": [*gpus], "restart": 0}


def make(
    folder: Path,
    *,
    allocations: Sequence[Mapping[str, Any]] = ALLOCATIONS,
    starts: Sequence[Mapping[str, Any]] = STARTS,
    steps: Sequence[Mapping[str, Any]] = (STEPS, STEPS),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "allocations.jsonl", [*allocations])
    write_lines(folder / "starts.jsonl", [*starts])
    write_lines(folder / "metrics.jsonl", [*steps])
    write_lines(folder / "usage-0.jsonl", [sample(2990), sample(3000)])
    return folder


def seconds(found: Cost) -> tuple[int | None, dict[str, int]]:
    hours = found.gpu_hours
    return hours if hours is None else round(3600 * hours), {
        kind: round(3600 * lost) for kind, lost in found.lost_gpu_hours.items()
    }


def test_the_gpu_hours_of_two_allocations_with_a_failure_and_a_spare(tmp_path: Path) -> None:
    found = read(make(tmp_path), job="12", state="COMPLETED", elapsed="00:18:30", requeues=1)
    assert seconds(found) == (ALL, LOST)
    assert found.kept_gpu_hours == pytest.approx((33_340 - 2080 - 4400 - 8460 - 160) / 3600)
    assert found.kept == pytest.approx(18_240 / 33_340)
    assert found.line == "Cost: 9.26 GPU hours, 5.07 kept (lost: starts 0.578, steps 1.22, spares 2.35, saves 0.0444)"
    assert [bar[2] for bar in found.bars] == ["of 9.26 kept; lost: starts 0.578, steps 1.22, spares 2.35, saves 0.0444"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # A script that does not use cluster_ddp: only what it had is known.
        ({"starts": (), "steps": ()}, (ALL, {"spares": LOST["spares"]})),
        # The agent saw the end of a training that had just saved.
        (
            {"starts": (STARTS[0], {"kind": "end", "time": 1990, "saved": True}, *STARTS[1:])},
            (ALL, {**LOST, "steps": 8 * 250}),
        ),
        # Nobody saw the second one die: how much it lost is not known.
        (
            {"starts": (*STARTS[:2], {**STARTS[2], "lost_s": None})},
            (ALL, {k: v for k, v in LOST.items() if k != "steps"}),
        ),
        # The ranks of the second start never met: all its time is lost.
        ({"starts": (STARTS[0], STARTS[2])}, (ALL, {**LOST, "starts": 8 * (100 + 1000 + 100), "steps": 8 * 300})),
        # No GPUs, or no record at all.
        ({"allocations": [{**one, "gpus": None} for one in ALLOCATIONS]}, (None, {})),
        ({"allocations": ()}, (None, {})),
        # Nothing says when the first allocation ended.
        ({"allocations": [{**one, "time": one["time"] + 9000} for one in ALLOCATIONS]}, (None, {})),
    ],
)
def test_what_is_not_known_is_missing(tmp_path: Path, changes: dict[str, Any], expected: tuple[Any, Any]) -> None:
    found = read(make(tmp_path, **changes))
    assert seconds(found) == expected
    assert (found.kept_gpu_hours is None) == (len(expected[1]) < 4)
    assert ("kept" in found.line) == (found.kept_gpu_hours is not None) and bool(found.line) == bool(expected[0])


@pytest.mark.parametrize(
    ("now", "seconds_had", "lost"),
    [
        # An hour ago, it began. It is alive: nothing since its checkpoint is lost yet.
        ({"job": "12", "state": "RUNNING", "elapsed": "01:00:00", "requeues": 1}, 3600, {"starts": 100, "steps": 0}),
        # Slurm has killed it, and knows how long it ran. The newest checkpoint is 600 s old then.
        ({"job": "12", "state": "TIMEOUT", "elapsed": "00:50:00", "requeues": 1}, 3000, {"starts": 100, "steps": 600}),
        # Slurm speaks of another start, or has forgotten it: the last sign of life counts.
        ({"job": "12", "state": "RUNNING", "elapsed": "00:00:01", "requeues": 2}, 2500, {"starts": 100, "steps": 100}),
        ({"job": "12"}, 2500, {"starts": 100, "steps": 100}),
    ],
)
def test_an_allocation_whose_end_nobody_has_noted(
    tmp_path: Path, now: dict[str, Any], seconds_had: int, lost: Mapping[str, int]
) -> None:
    began = time.time() - 3600
    run_dir = make(
        tmp_path, allocations=[{**ALLOCATIONS[4], "time": began}], starts=[{**STARTS[0], "time": began + 100}]
    )
    write_lines(run_dir / "usage-0.jsonl", [sample(began + 2500)])
    (run_dir / ".progress").write_text("step-9.pt")
    os.utime(run_dir / ".progress", (began + 2400, began + 2400))
    found = seconds(read(run_dir, **now))
    assert found[0] == pytest.approx(12 * seconds_had, abs=60)
    assert {kind: found[1][kind] for kind in lost} == pytest.approx(
        {kind: 8 * value for kind, value in lost.items()}, abs=40
    )


def test_a_clock_that_was_set_back_takes_nothing_from_the_sum(tmp_path: Path) -> None:
    began, over = ALLOCATIONS[4], ALLOCATIONS[6]
    first = [{**began, "requeue": 0, "time": 1000}, {**over, "time": 1100}]
    back = [{**began, "time": 1050}, {**over, "time": 1000}]
    found = seconds(read(make(tmp_path, allocations=[*first, *back], starts=())))
    assert found == (12 * 100, {"spares": 4 * 100, "saves": 8 * 20})


def test_the_time_for_reading_does_not_grow_with_the_square_of_the_records(tmp_path: Path) -> None:
    """Others may have written them. And each start whose end is not noted looks for its last sign of life."""
    numbers = range(3000)
    allocations = [{**ALLOCATIONS[0], "time": 1000 + at, "requeue": at // 2} for at in numbers]
    run_dir = make(tmp_path, allocations=allocations, starts=[{**STARTS[0], "time": 1000 + at} for at in numbers])
    write_lines(run_dir / "usage-0.jsonl", [sample(1000 + at) for at in numbers])
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
    run_dir = make(tmp_path)
    write_lines(run_dir / "usage-0.jsonl", [sample(10.0 * at, *gpus) for at, gpus in enumerate(samples)])
    found = read(run_dir, co2_g_per_kwh=200.0)
    assert found.energy_kwh == (None if kwh is None else pytest.approx(kwh))
    assert found.energy_kwh_by_node == ({} if by_node is None else {"node2": pytest.approx(by_node)})
    assert found.co2_kg == (None if kwh is None else pytest.approx(0.2 * kwh))
    assert ("Energy" in [bar[0] for bar in found.bars]) == (kwh is not None)


def test_energy_by_node_and_in_all_in_words(tmp_path: Path) -> None:
    run_dir = make(tmp_path, allocations=())
    write_lines(run_dir / "usage-0.jsonl", [sample(10, {**JOULES, "shared": 1.0})])
    write_lines(run_dir / "usage-1.jsonl", [sample(10, JOULES, JOULES, node="node10")])
    words = "1.5 kWh of the GPUs alone (node2 0.5, node10 1), 0.345 kg of CO2. Others used these GPUs, too"
    assert read(run_dir, co2_g_per_kwh=230.0).line == f"Cost: {words}"
    write_lines(run_dir / "usage-2.jsonl", [sample(10, {}, node="node11")])
    assert read(run_dir).line == "", "that of a node is not known"


def test_a_later_job_of_a_chain_is_the_one_that_runs(tmp_path: Path) -> None:
    run_dir = make(tmp_path, allocations=ALLOCATIONS[:5])
    status = RunStatus(job="15", name="c", state="RUNNING", requeues=1, chain=("12", "15"), run_dir=run_dir)
    found = cost.read(status)
    assert found.gpu_hours is not None
    assert found.gpu_hours > 1000, "from 1970 until now"


def test_the_sum_of_several(tmp_path: Path) -> None:
    one = read(make(tmp_path / "a"))
    other = dataclasses.replace(
        one, gpu_hours=None, kept_gpu_hours=None, lost_gpu_hours={"spares": 1.0}, energy_kwh=2.0
    )
    found = cost.total([one, other, Cost()])
    assert (found.gpu_hours, found.kept_gpu_hours, found.energy_kwh) == (one.gpu_hours, one.kept_gpu_hours, 2.0)
    assert found.lost_gpu_hours["spares"] == one.lost_gpu_hours["spares"] + 1
    assert cost.total([]) == Cost() and json.dumps(dataclasses.asdict(found))
