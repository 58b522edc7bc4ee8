"""The values of an array's tasks. `submission/test_grids.py` has what a person gives."""

from __future__ import annotations

import math

import pytest
from stand_ins import HOSTILE

from cluster_ddp.agent.array_values import configuration, fill_in, filled

GRID = {"seed": ("0", "1", "2"), "lr": ("0.1", "$(touch pwned) it's", "-1")}


def test_the_last_key_varies_fastest() -> None:
    grid = {"a": ("0", "1"), "b": ("x", "y", "z")}
    tasks = range(math.prod(map(len, grid.values())))
    assert [configuration(grid, task) for task in tasks] == [{"a": a, "b": b} for a in "01" for b in "xyz"]


def test_braces_around_anything_else_stay() -> None:
    assert fill_in('{"a": {lr}} {x} {} {a b}', {"lr": "0.1"}) == '{"a": 0.1} {x} {} {a b}'
    assert fill_in("{a}{b}", {"a": "{b}", "b": "x"}) == "{b}x", "values are not filled in again"


def test_each_task_has_its_values() -> None:
    command = ("echo", "{seed}:{lr}", "'{lr}'", *HOSTILE)
    found = [filled(command, GRID, {"SLURM_ARRAY_TASK_ID": str(task)}) for task in range(9)]
    assert found == [["echo", f"{s}:{lr}", f"'{lr}'", *HOSTILE] for s in GRID["seed"] for lr in GRID["lr"]]


@pytest.mark.parametrize(("env", "seed"), [({"SLURM_ARRAY_TASK_ID": "3"}, "3"), ({}, "{array_task_id}")])
def test_the_number_of_the_task_fills_its_placeholder(env: dict[str, str], seed: str) -> None:
    assert filled(("t", "--seed={array_task_id}"), {}, env) == ["t", f"--seed={seed}"]
