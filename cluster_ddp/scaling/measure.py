"""What one run tells: its throughput from metrics.jsonl, or from a number that the command prints; else its time."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File, Record
from cluster_ddp.files import json_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one run. None stands for what is not known."""

    samples_per_s: float | None
    """Samples per second of all ranks: the median of the run's records, without the first."""
    seconds: float | None
    """From the job's start to its end."""
    waiting_for_data: float | None = None
    """The part of the time that rank 0 waited for batches, 0 to 1."""
    epoch_samples: int | None = None
    """Number of samples of an epoch."""


def measure(run_dir: Path, *, seconds: float | None, metric: re.Pattern[str] | None) -> Measured:
    """Read the figures of a run that has ended.

    Args:
        run_dir: its run directory.
        seconds: from the job's start to its end.
        metric: its first group is the samples per second in a line of rank 0's log; None: metrics.jsonl has them.
    """
    if metric is not None:
        return Measured(samples_per_s=_steady(_printed(run_dir, metric)), seconds=seconds)
    records = [one for one in json_lines(run_dir / File.METRICS) if one.get("kind") == Record.TRAIN]
    waiting = _numbers(records, "waiting_for_data")
    return Measured(
        samples_per_s=_steady(_numbers(records, "samples_per_s")),
        seconds=seconds,
        waiting_for_data=_steady(waiting, zero=True),
        epoch_samples=_epoch_samples(records),
    )


def _steady(values: Sequence[float], *, zero: bool = False) -> float | None:
    """The median, without the first value, in which the training warms up."""
    kept = [value for value in values[1:] or values if value > 0 or zero]
    return statistics.median(kept) if kept else None


def _printed(run_dir: Path, metric: re.Pattern[str]) -> list[float]:
    found = []
    for path in (run_dir / File.TASK_LOG.format(0), run_dir / File.JOB_LOG):
        if path.is_file():
            for match in metric.finditer(path.read_text(errors="replace")):
                try:
                    found.append(float(match[1].replace(",", "")))
                except ValueError:
                    continue
        if found:
            break
    return found


def _epoch_samples(records: Sequence[dict[str, Any]]) -> int | None:
    """The most samples of an epoch that was followed by another; None without one."""
    epochs: dict[float, float] = {}
    for record in records:
        for epoch, samples in zip(_numbers([record], "epoch"), _numbers([record], "samples")):
            epochs[epoch] = max(samples, epochs.get(epoch, 0))
    complete = [epochs[epoch] for epoch in sorted(epochs)[:-1]]
    return int(max(complete)) if complete else None


def _numbers(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = [record.get(name) for record in records]
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
