"""What a benchmark prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from record import Figure

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("values", "ratios", "target", "met"),
    [
        ([1, 9, 2], [], {"at_least": 2}, True),
        ([1, 9, 2], [], {"at_least": 3}, False),
        ([1, 9, 2], [], {"at_most": 1.9}, False),
        ([1, 9, 2], [0.5, 0.6, 0.7], {"at_most": 0.6}, True),
        ([1, 9, 2], [0.5, 0.6, 0.7], {"at_least": 2}, False),
        ([1, 9, 2], [0.5, 0.6, 0.7], {"at_least": 0.5, "at_most": 0.55}, False),
        ([1, 9, 2], [0.5, 0.6, 0.7], {}, None),
    ],
)
def test_the_median_is_judged(
    values: list[float], ratios: list[float], target: dict[str, float], met: bool | None
) -> None:
    result = Figure(what="x", values=values, unit="s", ratios=ratios, **target).result()
    assert result["met"] is met
    assert (result["median"], result["spread"], result["runs"]) == (2, [1, 9], 3)
    assert result["ratio"] == (0.6 if ratios else None)


def printed(code: str, *arguments: str) -> dict[str, object]:
    """What a script in benchmarks/ prints."""
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv[0] = '/somewhere/x.py'\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_a_report_says_what_was_run_without_this_machines_folders() -> None:
    code = "from record import *; report(Figure(what='x', values=[1], unit='s'), left_out=['y: missing'])"
    told = printed(code, "--rounds", "3", "/home/me/bin/torchx", "--python=/home/me/bin/python", "data")
    assert told["command"] == "python benchmarks/x.py --rounds 3 …/torchx --python=…/python data"
    assert told["left_out"] == ["y: missing"]
    assert {"figures", "hardware", "versions", "date"} <= told.keys()


def test_what_can_not_be_measured_here_has_no_figures() -> None:
    told = printed("from record import unable; unable('it needs root')")
    assert told["unable"] == "it needs root"
    assert "figures" not in told
