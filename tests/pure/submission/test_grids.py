from __future__ import annotations

import pytest

from cluster_ddp.agent import array_values
from cluster_ddp.errors import SpecError
from cluster_ddp.submission import grids


@pytest.mark.parametrize(
    ("words", "grid", "array"),
    [
        (["0-7%4"], {}, "0-7%4"),
        (["seed=0..3"], {"seed": ("0", "1", "2", "3")}, "0-3"),
        (["seed=0..1", "lr=0.1,1.0"], {"seed": ("0", "1"), "lr": ("0.1", "1.0")}, "0-3"),
        (["seed=0..1,8", "%2"], {"seed": ("0", "1", "8")}, "0-2%2"),
        (["seed=0..1", "lr=1,2%3"], {"seed": ("0", "1"), "lr": ("1", "2")}, "0-3%3"),
        (["s=-1..1"], {"s": ("-1", "0", "1")}, "0-2"),
        (["opt=sgd momentum,it's,$(x),a=b"], {"opt": ("sgd momentum", "it's", "$(x)", "a=b")}, "0-3"),
    ],
)
def test_parse(words: list[str], grid: dict[str, tuple[str, ...]], array: str) -> None:
    assert grids.parse(words) == (grid, array)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["seed="], "an empty value"),
        (["seed=1,,2"], "an empty value"),
        (["seed=3..1"], "the range 3..1 is empty"),
        (["seed=1", "lr"], "each word is KEY=VALUES"),
        (["1seed=1", "x=2"], "each word is KEY=VALUES"),
        (["se ed=1"], "each word is KEY=VALUES"),
        (["seed=1", "seed=2"], "given twice"),
    ],
)
def test_bad_grids(words: list[str], found: str) -> None:
    with pytest.raises(SpecError, match=found):
        grids.parse(words)


@pytest.mark.parametrize(
    ("array", "tasks"),
    [("3", [3]), ("0-2", [0, 1, 2]), ("1,3-9:2%4", [1, 3, 5, 7, 9]), ("5,1,1", [1, 5]), ("0-6:3%1", [0, 3, 6])],
)
def test_the_tasks_of_an_array(array: str, tasks: list[int]) -> None:
    assert array_values.numbers(array) == tasks


def test_a_range_longer_than_any_array_is_refused_before_it_is_made() -> None:
    with pytest.raises(SpecError, match="no Slurm has arrays of more than 4,000,000 tasks"):
        grids.parse(["seed=0..99999999999"])
    assert (grids.count("0-3999999"), grids.last("5,0-3999999:2")) == (4_000_000, 3_999_998)
