"""How a training went: where the time of its steps went, its ranks side by side, its starts, what it has printed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster_ddp.errors import SpecError
from cluster_ddp.jobs.report.usage import weighted_mean
from cluster_ddp.run.files import LOG_BYTES, each_json_line, json_lines, number, tail
from cluster_ddp.run.names import File, Record

PARTS = ("data_s", "compute_s", "communication_s", "optimizer_s", "checkpoint_s")
"""The parts of a step in a "steps" record."""
RESULTS = ("loss", "accuracy")
"""What a training results in."""
_EXAMPLE = r"--metric 'images/s: ([0-9.]+)'"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStart:
    """One start of a training."""

    time: float
    """Seconds of UNIX time."""
    restart: int
    """Slurm's number of restarts of the job."""
    step: int
    """Number of steps that were done."""
    ranks: int
    """Number of ranks."""
    cause: str | None
    """Why the start before ended; None for the first."""
    lost_s: float | None
    """Seconds of training that are done again; None if unknown."""
    id: int | None = None
    """What the job's agent calls the start of the ranks (`run.start.Start.id`); None if it has not started them."""
    has_saved: bool = False
    """Whether it noted at its end that a checkpoint has all that was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStats:
    """What the records of a run say of its training. None, or nothing, stands for what is not known."""

    step_s: float | None = None
    """Mean seconds of a step on rank 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each of `PARTS` in a mean step."""
    saves_s: float | None = None
    """Seconds in which saves held up the steps, all together."""
    slowest: float | None = None
    """How much longer a step takes the slowest rank than the fastest, without communication: 1.5 for 50 % more."""
    slowest_rank: int | None = None
    """The rank that was the slowest most often."""
    waiting_for_data: float | None = None
    """The part of the training's time in which rank 0 waited for batches, 0 to 1."""
    progress: float | None = None
    """The part of the training that is done, 0 to 1."""
    starts: Sequence[TrainingStart] = ()
    """Its starts, the first one first."""
    results: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """By kind of record, such as "test", the last of each of `RESULTS` that it has; None if that is not finite."""

    @property
    def lacks_communication(self) -> bool:
        """Whether several ranks trained, and it was not measured how long they waited for each other."""
        return bool(self.parts) and "communication_s" not in self.parts and any(one.ranks > 1 for one in self.starts)


def read(run_dir: Path) -> TrainingStats:
    """Return how the training of a run went. Damaged records are passed over."""
    steps, waiting = [], []
    results: dict[str, dict[str, float | None]] = {}
    for record in each_json_line(run_dir / File.METRICS):
        for name in RESULTS:
            if name in record:
                results.setdefault(str(record.get("kind")), {})[name] = number(record[name])
        if record.get("kind") == Record.STEPS and _positive(record, "steps", "step_s"):
            steps.append(record)
        elif record.get("kind") == Record.TRAIN:
            waiting.append(record.get("waiting_for_data"))
    ranks = [one for one in steps if _positive(one, "rank_s_min", "rank_s_max")]
    slowest = [one["slowest_rank"] for one in ranks if isinstance(one.get("slowest_rank"), int)]
    return TrainingStats(
        step_s=_mean(steps, "step_s"),
        parts={part: mean for part in PARTS if (mean := _mean(steps, part)) is not None},
        saves_s=_saves_s(steps),
        slowest=statistics.median(one["rank_s_max"] / one["rank_s_min"] for one in ranks) if ranks else None,
        slowest_rank=statistics.mode(slowest) if slowest else None,
        waiting_for_data=_waiting(waiting, steps),
        progress=next((one["progress"] for one in reversed(steps) if _positive(one, "progress")), None),
        starts=_starts(run_dir),
        results=results,
    )


def _waiting(values: Sequence[Any], steps: Sequence[Mapping[str, Any]]) -> float | None:
    if (data_s := _mean(steps, "data_s")) is not None and (step_s := _mean(steps, "step_s")):
        return min(1.0, data_s / step_s)
    found = [float(value) for value in values if isinstance(value, (int, float)) and 0 <= value <= 1]
    return statistics.median(found) if found else None


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean over all steps of the records that have it."""
    return weighted_mean((one["steps"], number(one.get(name))) for one in steps)


def _positive(record: Mapping[str, Any], *names: str) -> bool:
    return all((number(record.get(name)) or 0) > 0 for name in names)


def _saves_s(steps: Sequence[Mapping[str, Any]]) -> float | None:
    known = [one["steps"] * save_s for one in steps if (save_s := number(one.get("checkpoint_s"))) is not None]
    return sum(known) if known else None


def _is_start(record: Mapping[str, Any]) -> bool:
    is_whole = all(isinstance(record.get(name), int) for name in ("restart", "step", "ranks"))
    return record.get("kind") == "start" and is_whole and _positive(record, "time")


def _starts(run_dir: Path) -> list[TrainingStart]:
    found: list[TrainingStart] = []
    for one in json_lines(run_dir / File.STARTS):
        if _is_start(one):
            found.append(_start(one))
        elif found and one.get("kind") == "end" and one.get("saved"):
            found[-1] = replace(found[-1], has_saved=True)
    return found


def _start(record: Mapping[str, Any]) -> TrainingStart:
    cause, lost_s, start_id = record.get("cause"), number(record.get("lost_s")), record.get("start_id")
    return TrainingStart(
        time=float(record["time"]),
        restart=record["restart"],
        step=record["step"],
        ranks=record["ranks"],
        cause=cause if isinstance(cause, str) else None,
        lost_s=None if lost_s is None else float(lost_s),
        id=start_id if type(start_id) is int else None,
    )


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of --metric, which has a group for each figure.

    Raises:
        SpecError: it is no regular expression, or has no group.
    """
    asked = f"Reading --metric {pattern!r}:"
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise SpecError(asked, f"{error}.", _EXAMPLE) from error
    if not found.groups:
        raise SpecError(asked, "it has no group, so it does not say which part is the number.", _EXAMPLE)
    return found


def printed(run_dir: Path, pattern: re.Pattern[str]) -> dict[str, list[float]]:
    """Return the figures that rank 0 has printed, in order: of each group of the pattern, by name or number.

    Its command need not know anything of cluster_ddp. A figure may have commas, as in 1,234.5.
    """
    names = {group: name for name, group in pattern.groupindex.items()}
    for path in (run_dir / File.TASK_LOG.format(0), run_dir / File.JOB_LOG):
        found: dict[str, list[float]] = {}
        for match in pattern.finditer(tail(path, LOG_BYTES)):
            for group, text in enumerate(match.groups(), 1):
                try:
                    found.setdefault(names.get(group, str(group)), []).append(float((text or "").replace(",", "")))
                except ValueError:
                    continue
        if found:
            return found
    return {}
