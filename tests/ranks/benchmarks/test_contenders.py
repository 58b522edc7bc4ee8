"""The stopwatch around the contenders' loops, and what is made of their blocks."""

from __future__ import annotations

import argparse
import io
import json

import pytest
import throughput
import torch
import weak_scaling
from common import Net, Watch
from contenders import DOCUMENTS, Block

BATCHES = [(torch.zeros(size, 1), torch.zeros(size)) for size in (1, 2, 4, 8, 16, 32, 64, 128)]


def watched(capsys: pytest.CaptureFixture[str], *, paced: bool) -> tuple[int, list[dict[str, float]]]:
    """How many steps there were, and the blocks that were reported."""
    watch = Watch(argparse.Namespace(warmup=1, steps=2, paced=paced))
    steps = sum(1 for _ in watch(BATCHES))
    return steps, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.quick
def test_a_watch_leaves_out_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    steps, (block,) = watched(capsys, paced=False)
    assert (steps, block["samples"]) == (3, 2 + 4)
    assert 0 <= block["waited_s"] <= block["seconds"]


def test_a_paced_watch_measures_once_for_each_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    steps, blocks = watched(capsys, paced=True)
    assert steps == 6
    assert [block["samples"] for block in blocks] == [2 + 4, 16 + 32]


def test_an_epoch_that_is_too_short_is_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n\n"))
    with pytest.raises(SystemExit, match="fewer steps"):
        watched(capsys, paced=True)


def test_the_baselines_model_is_that_of_the_example() -> None:
    assert sum(one.numel() for one in Net().parameters()) == 1_199_882


def test_throughput_compares_turns_of_the_same_round() -> None:
    ours = throughput.OURS[0]
    blocks = {
        DOCUMENTS.name: [Block(samples=100, seconds=1, waited_s=0.1), Block(samples=100, seconds=2, waited_s=0)],
        ours.name: [Block(samples=200, seconds=1, waited_s=0), Block(samples=200, seconds=2, waited_s=0.01)],
    }
    figures = throughput.figures([DOCUMENTS, ours], blocks, {"fp32": [10.0, 14.314], "bf16": [1.0, 1.0]})
    found = {one.what: one for one in figures}
    assert found[ours.name].ratios == [2, 2]
    assert found[f"{ours.name}: of the cores' rate"].values == pytest.approx([100, 50])
    assert found[f"{ours.name}: waiting for data"].values == [0, 0.5]


def test_weak_scaling_tells_communication_from_what_cores_share() -> None:
    rounds = [weak_scaling.Round(alone=100, together=72, apart=80), weak_scaling.Round(alone=50, together=36, apart=40)]
    _, to_alone, to_apart = weak_scaling.figures(weak_scaling.OURS, rounds)
    assert list(to_alone.ratios) == [0.72, 0.72]
    assert list(to_apart.ratios) == [0.9, 0.9]
    assert to_alone.limit == "two processes apart: 0.800"
