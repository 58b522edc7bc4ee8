"""The short form of `make chaos`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from cluster import ROOT, sandbox_name
from slowness import LIMIT_S, scaled


@pytest.mark.full
def test_a_few_random_faults_cost_nothing(machine: None) -> None:
    """Weights, metrics and the ledger of samples are those of a training that had none; nothing is left behind."""
    options = (
        "--faults",
        "3",
        "--epochs",
        "6",
        "--ranks-per-node",
        "1",
        "--seed",
        "63",
        "--name",
        sandbox_name("chaos"),
    )
    command, env = (sys.executable, "-m", "chaos", *options), {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["violation"] is None and summary["faults"] >= 3
    assert summary["goodput"]["all"]["goodput"] > 0  # both times are the clock's: on a busy machine it is over 1
