"""The runs of a study, and what each tells.

For each number of GPUs as few nodes as possible are used. A run's throughput is from metrics.jsonl, or from a number
that the command prints; else there is only its time.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.errors import SpecError
from cluster_ddp.jobs.report import training_stats
from cluster_ddp.run.files import each_json_line, number
from cluster_ddp.run.names import File, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a configuration."""

    gpus: int
    """Number of GPUs of the job."""
    nodes: int
    """Number of nodes."""
    repeat: int
    """Number of the run of this configuration, from 1."""

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs on each node."""
        return self.gpus // self.nodes

    @property
    def name(self) -> str:
        """Name of its job."""
        return f"gpus{self.gpus}-run{self.repeat}"


def parse_counts(text: str) -> list[int]:
    """Parse numbers of GPUs, such as "1,2,4,8". Returns them in ascending order, each once.

    Raises:
        SpecError: there is none, or one is no whole number of 1 or more.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1_000_000 for word in words):
        raise SpecError(f"Measuring with {text!r} GPUs:", "it is a list of whole numbers.", "--gpus 1,2,4,8")
    return sorted({int(word) for word in words})


def points(counts: Sequence[int], *, per_node: int, repeats: int) -> list[Point]:
    """Return the runs of a study: all counts of GPUs once, then again. A node is filled before the next one is used."""
    # The fewest nodes on which a number of GPUs can be spread equally.
    fewest = {n: next(k for k in range(1, n + 1) if n % k == 0 and n // k <= per_node) for n in counts}
    runs = range(1, repeats + 1)
    return [Point(gpus=count, nodes=fewest[count], repeat=repeat) for repeat in runs for count in counts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one run. None stands for what is not known."""

    samples_per_s: float | None
    """Samples per second of all ranks: the median of the run's records, without the first."""
    seconds: float | None
    """From the job's start to its end."""
    waiting_for_data: float | None = None
    """The part of the time that rank 0 waited for batches, 0 to 1."""
    communication: float | None = None
    """The part of a step that its all-reduces take and backward does not hide, 0 to 1."""
    epoch_samples: int | None = None
    """Number of samples of an epoch."""
    training_s: float | None = None
    """Seconds that all steps of the training take, as far as it was seen; evaluations not counted."""


def measure(run_dir: Path, *, seconds: float | None, metric: re.Pattern[str] | None) -> Measured:
    """Read the figures of a run that has ended, whose job took so many seconds.

    The first group of `metric` is the samples per second in a line of rank 0's log. Without it, metrics.jsonl has them.
    """
    if metric is not None:
        first = next(iter(training_stats.printed(run_dir, metric).values()), [])
        return Measured(samples_per_s=_steady(first), seconds=seconds)
    kinds = (Record.TRAIN, Record.STEPS)
    records = [one for one in each_json_line(run_dir / File.METRICS) if one.get("kind") in kinds]
    train, steps = ([one for one in records if one["kind"] == kind] for kind in kinds)
    split = training_stats.read(run_dir)
    communication_s = split.parts.get("communication_s")
    return Measured(
        samples_per_s=_steady(_numbers(train, "samples_per_s") or _numbers(steps, "samples_per_s")),
        seconds=seconds,
        waiting_for_data=split.waiting_for_data,
        communication=communication_s / split.step_s if communication_s is not None and split.step_s else None,
        epoch_samples=_epoch_samples(train),
        training_s=_training_s(steps),
    )


def _steady(values: Sequence[float]) -> float | None:
    """The median, without the first value, in which the training warms up."""
    kept = [value for value in values[1:] or values if 0 < value < math.inf]
    return statistics.median(kept) if kept else None


def _epoch_samples(records: Sequence[dict[str, Any]]) -> int | None:
    """The most samples of an epoch that was followed by another; None without one."""
    epochs: dict[float, float] = {}
    for record in records:
        for epoch, samples in zip(_numbers([record], "epoch"), _numbers([record], "samples")):
            epochs[epoch] = max(samples, epochs.get(epoch, 0))
    complete = [epochs[epoch] for epoch in sorted(epochs)[:-1]]
    return int(max(complete)) if complete else None


def _training_s(records: Sequence[dict[str, Any]]) -> float | None:
    """The seconds of all steps: of those that were seen, and as long for each of the rest. None if that is unknown."""
    seconds = [count * each for count, each in zip(_numbers(records, "steps"), _numbers(records, "step_s"))]
    progress = _numbers(records[-1:], "progress")
    return sum(seconds) / progress[0] if seconds and progress and progress[0] > 0 else None


def _numbers(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(found) for record in records if (found := number(record.get(name))) is not None]
