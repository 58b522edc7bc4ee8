from __future__ import annotations

import csv

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.scaling import output, speedups
from cluster_ddp.scaling.points import Measured, parse_counts, points


def measured(rates: dict[int, list[float | None]], **more: object) -> tuple[dict, list]:
    runs = max(len(of_count) for of_count in rates.values())
    all_points = points(sorted(rates), per_node=4, repeats=runs)
    found = {
        point: Measured(samples_per_s=rates[point.gpus][point.repeat - 1], seconds=None, **more)  # type: ignore[arg-type]
        for point in all_points
        if point.repeat <= len(rates[point.gpus])
    }
    return found, all_points


def rows(rates: dict[int, list[float | None]], **more: object) -> list[speedups.Row]:
    return speedups.rows(*measured(rates, **more), weak=True)


@pytest.mark.parametrize(("text", "counts"), [("4,1,2,2", [1, 2, 4]), ("8", [8]), (" 1 , 16 ", [1, 16])])
def test_numbers_of_gpus(text: str, counts: list[int]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "1,", "0,1", "-1", "1-4", "a", "1.5", "²"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="list of whole numbers"):
        parse_counts(text)


def test_a_node_is_filled_before_the_next_one() -> None:
    found = points([1, 2, 3, 4, 6, 8, 10, 7], per_node=4, repeats=1)
    assert [(point.nodes, point.gpus_per_node) for point in found] == [
        *((1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (5, 2), (7, 1))
    ]
    assert [point.name for point in points([1, 2], per_node=4, repeats=2)] == [
        *("gpus1-run1", "gpus2-run1", "gpus1-run2", "gpus2-run2")
    ]


def test_speedup_and_efficiency_against_the_fewest_gpus() -> None:
    one, two, eight = rows({1: [90, 100, 110], 2: [190, 190, 190], 8: [400, 410, 390]})
    assert (one.speedup, one.efficiency, one.samples_per_s_least, one.samples_per_s_most) == (1, 1, 90, 110)
    assert (two.speedup, two.efficiency) == pytest.approx((1.9, 0.95))
    assert (eight.nodes, eight.speedup, eight.efficiency) == pytest.approx((2, 4, 0.5))
    two, four = rows({2: [200], 4: [300]})
    assert (two.speedup, two.efficiency, four.speedup, four.efficiency) == (2, 1, 3, 0.75)


def test_what_is_missing_is_missing() -> None:
    one, two, four = rows({1: [], 2: [100], 4: [None]})
    assert (one.runs, one.samples_per_s, one.speedup, one.efficiency) == (0, None, None, None)
    assert (two.speedup, four.speedup, four.samples_per_s) == (2, None, None)
    text = speedups.as_text([one, two, four])
    assert text.splitlines()[1].split() == ["1", "1", "0", *["-"] * 9]
    assert next(csv.DictReader(speedups.as_csv([one]).splitlines()))["samples_per_s"] == ""
    said = speedups.recommended([one, two, four], min_efficiency=0.8)
    assert said == "No recommendation: it needs two numbers of GPUs that are measured."


def test_times_are_compared_where_nothing_else_is_known() -> None:
    all_points = points([1, 4], per_node=4, repeats=1)
    found = {point: Measured(samples_per_s=None, seconds={1: 100.0, 4: 50.0}[point.gpus]) for point in all_points}
    assert [row.speedup for row in speedups.rows(found, all_points, weak=False)] == [1, 2]
    assert [row.efficiency for row in speedups.rows(found, all_points, weak=True)] == [1, 2]
    assert speedups._rates(speedups.rows(found, all_points, weak=False), weak=False) == {1: 0.01, 4: 0.02}


def test_gpu_hours_of_an_epoch() -> None:
    found = rows({2: [100.0], 4: [160.0]}, epoch_samples=36_000)
    assert [row.gpu_hours_per_epoch for row in found] == pytest.approx([0.2, 0.25])


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (
            {1: 100, 2: 190, 8: 700, 16: 900},
            "8 GPUs (--nodes 2 --gpus-per-node 4): the most with an efficiency of 80 % or more; it is 88 %. "
            "A spare node (--restarts 3 --spare-nodes 1) costs 4 GPUs that wait idle, 50 % more. "
            "With 2 nodes it rarely pays, but --restarts 3 does.",
        ),
        (
            {4: 100, 32: 800},
            "32 GPUs (--nodes 8 --gpus-per-node 4): the most with an efficiency of 80 % or more; it is 100 %. "
            "To start with what is free: --nodes 1-8. "
            "A spare node (--restarts 3 --spare-nodes 1) costs 4 GPUs that wait idle, 12 % more.",
        ),
        (
            {1: 100, 2: 120},
            "1 GPU (--nodes 1 --gpus-per-node 1): no larger number that was measured has an efficiency of 80 %.",
        ),
    ],
)
def test_the_recommendation(rates: dict[int, float], words: str) -> None:
    found = rows({count: [rate] for count, rate in rates.items()})
    assert speedups.recommended(found, min_efficiency=0.8) == f"Recommendation: {words}"


def test_the_picture(tmp_path) -> None:
    found = rows({1: [90, 110], 2: [180, 200], 4: [390, 410]})
    paths = output.draw(tmp_path / "results", found)
    assert [path.name for path in paths] == ["results.png", "results.svg"]
    assert paths[0].read_bytes()[:4] == b"\x89PNG"
    svg = paths[1].read_text()
    assert svg.count("<path") > 10
    assert output.draw(tmp_path / "none", found[:1]) == []
