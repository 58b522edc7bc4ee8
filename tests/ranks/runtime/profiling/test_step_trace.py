"""A trace of any script's steps, as `submit --trace` asks for it."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

import cluster_ddp
from cluster_ddp.runtime.profiling.step_trace import StepTrace, asked_steps

pytestmark = pytest.mark.full


def run(path: Path, steps: int) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cluster_ddp.distributed(cuda=False) as world:
        checkpoint = cluster_ddp.Checkpointer(world, run_dir=path, model=model, optimizer=optimizer)
        for _ in checkpoint.until(steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            checkpoint.step()


def traced(path: Path) -> int:
    with gzip.open(path / "trace-rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#SGD.step" for event in events)


def test_a_script_with_a_checkpointer_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "without", 10)
    assert not list((tmp_path / "without").glob("trace-*"))
    monkeypatch.setenv("CLUSTER_DDP_TRACE", "3")
    run(tmp_path / "it's traced", 10)
    assert traced(tmp_path / "it's traced") == 3
    run(tmp_path / "short", 5)  # two are skipped, one warms the profiler up
    assert traced(tmp_path / "short") == 2


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("cluster_ddp").propagate = True
    trace = StepTrace(1, tmp_path / "missing" / "trace.json.gz", torch.device("cpu"), after=1)
    for _ in range(6):
        trace.step()
    trace.stop()
    assert "The trace was not written" in caplog.text


def test_what_is_asked() -> None:
    assert [asked_steps({"CLUSTER_DDP_TRACE": text}) for text in ("", "0", "x", "12")] == [None, None, None, 12]
    assert asked_steps({}) is None


def test_on_gpus_the_parts_are_named_for_nsight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for NVTX, which needs CUDA."""
    calls: list[str] = []
    monkeypatch.setattr(StepTrace, "is_asked", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with contextlib.suppress(ZeroDivisionError), cluster_ddp.trace_range("forward"):
        calls.append("inside")
        raise ZeroDivisionError
    assert calls == ["forward", "inside", "pop"]


def test_without_a_trace_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTrace, "is_asked", False)
    assert isinstance(cluster_ddp.trace_range("forward"), contextlib.nullcontext)
    assert cluster_ddp.trace_range("forward") is cluster_ddp.trace_range("update")
