"""How much of the communication runs beside the backward pass, from a profile (torch.profiler's Chrome trace)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Interval = tuple[float, float]


def kernels(trace: Path) -> tuple[list[Interval], list[Interval]]:
    """When NCCL's kernels ran, and when all others did; in microseconds.

    DDP waits for its all-reduces at the end of the backward pass: a kernel beside one is the backward pass' own.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    found: tuple[list[Interval], list[Interval]] = ([], [])
    for event in events:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            found[0 if "nccl" in event["name"].lower() else 1].append((start, start + float(event["dur"])))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Of what they cover together."""
    return sum(stop - start for start, stop in _merged(intervals))


def shared(these: Sequence[Interval], those: Sequence[Interval]) -> float:
    """How long both were at work."""
    return length(these) + length(those) - length([*these, *those])


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
