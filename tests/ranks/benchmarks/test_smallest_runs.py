"""Benchmarks that take the package apart, in their smallest form: they break where its parts change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.full
def test_our_training_without_an_exchange_of_gradients(tmp_path: Path) -> None:
    words = ("--only-wait", "--warmup=1", "--steps=2", f"--data-dir={tmp_path}", "--", "--dataset", "digits")
    command = [sys.executable, str(BENCHMARKS / "baselines" / "ours.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["samples"] == 2 * 64


@pytest.mark.full
def test_observing_a_training() -> None:
    found = bench.run([sys.executable, str(BENCHMARKS / "observing.py"), "--runs=1", "--steps=2"])
    assert len(found.get("figures", ())) == 4, found
