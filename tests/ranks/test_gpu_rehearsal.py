"""The tests that wait for a GPU can run: each is rehearsed on the CPU, with torch and NumPy only. See tests/gpu/run.py.

The tests of two ranks on one GPU are those of several nodes, which are rehearsed with two ranks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from gpu_rehearsal import GPU_TESTS, each_test_can_run, run

pytestmark = pytest.mark.full


@pytest.mark.parametrize("group", ["gpu", "gpu_pair"])
def test_without_a_gpu_it_says_loudly_that_nothing_was_tested(group: str, tmp_path: Path) -> None:
    done = run(group, "--figures", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "!! NOTHING WAS TESTED." in done.stdout
    assert "Why:         torch sees no GPU" in done.stdout
    assert "--rehearse" in done.stdout
    assert re.fullmatch(r"0 passed, 0 failed, [1-9]\d* skipped", done.stdout.splitlines()[-1])
    assert not (tmp_path / "figures.json").exists()


def test_what_only_a_gpu_shows_is_said_and_figures_are_marked(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("gpu", "--rehearse", "--only", "a_copy", "--figures", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED: only on a GPU: pinned memory" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
    assert json.loads(figures.read_text())["gpu"]["is_rehearsal"]


def test_each_test_can_run(tmp_path: Path) -> None:
    each_test_can_run("gpu", tmp_path)


def test_two_ranks_are_rehearsed() -> None:
    done = run("gpu_pair", "--rehearse", "--only", "an_exception_ends_all-graph", "--only", "without_gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"


def test_a_failure_is_told_and_counts() -> None:
    """An unknown name is an error; a test whose time is over fails."""
    assert "no test has ['nonsense']" in run("gpu", "--rehearse", "--only", "nonsense").stderr
    done = run("gpu", "--rehearse", "--only", "a_copy", "--limit-s", "0")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_ranks_get_cpus_and_each_test_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun takes no --cpus-per-task from the job since Slurm 22.05: a rank and its loader's workers had one CPU."""
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run as groups

    options = groups._parser().parse_args(["gpu_nodes", "--srun=--partition=gpu"])
    assert groups._place(options) == ["--nodes=2", "--gres=gpu:8", "--cpus-per-task=4", "--partition=gpu"]
    assert groups._limit_s(options, 20) == 20 * groups.LIMIT_S
    assert groups._limit_s(groups._parser().parse_args(["gpu", "--limit-s", "0"]), 20) == 0


def test_overlap_is_the_time_that_both_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU_TESTS))
    import overlap

    kernels = [("ncclDevKernel_AllReduce", 10, 10), ("conv", 5, 7), ("conv", 11, 2), ("conv", 19, 5), ("conv", 30, 1)]
    events = [{"cat": "kernel", "name": name, "ts": start, "dur": length} for name, start, length in kernels]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*events, {"cat": "gpu_user_annotation", "name": "nccl:all_reduce"}]}))
    nccl, others = overlap.kernels(trace)
    assert (overlap.length(nccl), overlap.length(others)) == (10, 14)
    assert overlap.shared(nccl, others) == 4  # 10 to 13, and 19 to 20
