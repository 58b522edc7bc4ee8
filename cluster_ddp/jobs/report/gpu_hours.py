"""The GPU hours of a run, over all its jobs, requeues and restarts, and what was lost of them.

allocations.jsonl says how many nodes its jobs had, from when on, and when their ranks started and ended. starts.jsonl
says when the training itself began in these starts.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster_ddp.jobs.report import usage
from cluster_ddp.jobs.report.training_stats import Start, Training
from cluster_ddp.protocol import File
from cluster_ddp.run_files import json_lines, number
from cluster_ddp.slurm.job_status import FINAL_STATES, elapsed_s

KINDS = ("starts", "steps", "spares", "saves")
"""What GPU hours are lost to. starts: from Slurm's start of a job, or the end of the ranks before, until the training
began: imports, rendezvous, loading. steps: after the newest checkpoint of a start that failed. spares: nodes that
waited. saves: they held up the steps."""

_ALIVE = ("RUNNING", "COMPLETING")
_SAMPLES = 16 << 20  # bytes of a node's, of two days
_MOST = 1_000_000  # of nodes or GPUs, in a file that makes sense


@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """What the scheduler says of the run's last job."""

    job: str = ""
    """Its id."""
    state: str = "unknown"
    """Its state."""
    elapsed: str | None = None
    """Since its last start."""
    requeues: int | None = None
    """How often it was requeued."""


@dataclass(kw_only=True, slots=True)
class _Ranks:
    """A start of the ranks. Times are seconds of UNIX time."""

    since: float
    until: float | None = None
    """When they ended; else, once all is read, when the next ones started, or when their job was over."""
    is_noted: bool = False
    """Whether the agent has noted their end, or the job's."""
    state: object = None
    """How they ended, as the agent says."""
    saved: float = 0.0
    """When the newest checkpoint was saved, at their end."""


@dataclass(kw_only=True, slots=True)
class _Allocation:
    """What a job had, from a start by Slurm to a requeue or its end."""

    key: tuple[object, object]
    """The job, and how often it was requeued before."""
    gpus: int | None
    """GPUs of each node."""
    starts: list[_Ranks] = field(default_factory=list)
    had: list[tuple[float, int, int]] = field(default_factory=list)
    """From when on how many nodes, and how many of them to train."""
    over: float | None = None
    """When it ended."""

    @property
    def since(self) -> float:
        """When it began."""
        return self.had[0][0]

    def add(self, at: float, nodes: int, training: int) -> None:
        """Note what it had from then on; by a clock that was set back, from the change before on."""
        self.had.append((max([at, *(before for before, *_ in self.had[-1:])]), nodes, training))

    def hours(self, since: float, until: float, count: Callable[[int, int], int]) -> float:
        """Return the GPU hours of so many nodes in a stretch of time; `count` takes all, and those that train."""
        return sum(seconds * count(*nodes) for seconds, nodes in self._pieces(since, until)) * (self.gpus or 0) / 3600

    def _pieces(self, since: float, until: float) -> Iterator[tuple[float, tuple[int, int]]]:
        """Yield for how many seconds of a stretch it had which numbers of nodes."""
        first = max(0, bisect_right(self.had, (since, float("inf"))) - 1)
        for at in range(first, len(self.had)):
            began, *nodes = self.had[at]
            if began >= until:
                return
            end = self.had[at + 1][0] if at + 1 < len(self.had) else until
            yield max(0.0, min(end, until) - max(began, since)), (nodes[0], nodes[1])


def read(run_dir: Path, now: Now, training: Training) -> tuple[float | None, dict[str, float]]:
    """Return the GPU hours of a run, None if unknown, and what was lost of them by kind, as far as it is known."""
    found, signs = _allocations(run_dir), _SignsOfLife(run_dir)
    is_now = bool(found) and now.job in ("", found[-1].key[0]) and now.requeues in (None, found[-1].key[1])
    for one, after in zip(found, [*found[1:], None]):
        if one.over is None:
            one.over = _over(one, signs, now if after is None and is_now else Now(), after)
        for start, then in zip(one.starts, [*(start.since for start in one.starts[1:]), one.over]):
            start.until = then if start.until is None else start.until
    if not found or any(one.gpus is None or one.over is None for one in found):
        return None, {}
    is_alive = is_now and now.state in _ALIVE
    lost = _lost(found, training, _Saved(run_dir), is_alive=is_alive) if training.starts else {}
    total, trains, spares = (_sum(found, count) for count in (_all, _training, _spare))
    if training.saves_s is not None and total:
        lost["saves"] = training.saves_s * trains / sum((one.over or 0.0) - one.since for one in found)
    lost["spares"] = spares
    return total, {kind: hours for kind in KINDS if (hours := lost.get(kind)) is not None}


def _all(nodes: int, training: int) -> int:
    return nodes


def _training(nodes: int, training: int) -> int:
    return min(nodes, training)


def _spare(nodes: int, training: int) -> int:
    return max(0, nodes - training)


def _sum(found: Sequence[_Allocation], count: Callable[[int, int], int]) -> float:
    return sum(one.hours(one.since, one.over or 0.0, count) for one in found)


def _allocations(run_dir: Path) -> list[_Allocation]:
    found: list[_Allocation] = []
    for record in json_lines(run_dir / File.ALLOCATIONS):
        if (at := number(record.get("time"))) is None:
            continue
        if record.get("kind") == "start" and _is_count(record.get("nodes")) and _is_count(record.get("training")):
            key, gpus = (record.get("job"), record.get("requeue")), record.get("gpus")
            if not found or found[-1].over is not None or found[-1].key != key:
                at = max(at, (found[-1].over or at) if found else at)  # a batch script may launch several times
                found.append(_Allocation(key=key, gpus=gpus if _is_count(gpus) else None))
            found[-1].starts.append(_Ranks(since=at))
            found[-1].add(at, record["nodes"], record["training"])
        elif found and found[-1].over is None:
            _add_change(found[-1], record, at)
    return found


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST


def _add_change(one: _Allocation, record: Mapping[str, Any], at: float) -> None:
    kind, start = record.get("kind"), one.starts[-1]
    if kind == "nodes" and _is_count(record.get("nodes")):
        one.add(at, record["nodes"], one.had[-1][2])
    if kind in ("end", "over") and start.until is None:
        start.until, start.is_noted, start.state = at, True, record.get("state")
        start.saved = number(record.get("saved")) or 0.0
    if kind == "over":
        one.over = max(at, one.since)


class _SignsOfLife:
    """When a run directory was written to, as its records say: read once, and only if an end is not noted."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @cached_property
    def _times(self) -> list[float]:
        samples, noted = usage.records(self._run_dir, last_bytes=_SAMPLES), json_lines(self._run_dir / File.STARTS)
        times = (number(record.get("time")) for records in (samples, noted) for record in records)
        return sorted(at for at in times if at is not None)

    def last(self, since: float, before: float) -> float | None:
        """Return the last one in a stretch of time; None without one."""
        count = bisect_left(self._times, before)
        return self._times[count - 1] if count and self._times[count - 1] >= since else None


def _over(one: _Allocation, signs: _SignsOfLife, now: Now, after: _Allocation | None) -> float | None:
    """When an allocation ended whose agent was killed or lost, or until when it has lasted; None if unknown."""
    if now.state in _ALIVE:
        return time.time()
    if now.state in FINAL_STATES and now.elapsed:
        return one.since + elapsed_s(now.elapsed)
    return signs.last(one.starts[-1].since, float("inf") if after is None else after.since)


class _Saved:
    """When all that a training had done was saved."""

    def __init__(self, run_dir: Path) -> None:
        ends = (one for one in json_lines(run_dir / File.STARTS) if one.get("kind") == "end" and one.get("saved"))
        self._ends = sorted(number(one.get("time")) or 0.0 for one in ends)
        self.newest = 0.0
        """When the newest checkpoint was saved."""
        with suppress(OSError):
            self.newest = (run_dir / File.PROGRESS).stat().st_mtime

    def between(self, since: float, until: float) -> bool:
        """Whether it has ended there with a checkpoint of all."""
        return bisect_left(self._ends, since) < bisect_left(self._ends, until)


def _lost(
    found: Sequence[_Allocation], training: Training, saved: _Saved, *, is_alive: bool
) -> dict[str, float | None]:
    """The GPU hours until the training began, and those of steps that were lost; None if one is unknown."""
    waited, lost = 0.0, list[float | None]()
    times = sorted((each.time, at) for at, each in enumerate(training.starts))
    for one in found:
        since = one.since
        for start in one.starts:
            until = start.until or start.since
            trained = sorted(at for _, at in times[bisect_left(times, (start.since,)) : bisect_left(times, (until,))])
            waited += one.hours(since, training.starts[trained[0]].time if trained else until, _training)
            since = until
            for at in trained:
                began, after = training.starts[at], next(iter(training.starts[at + 1 : at + 2]), None)
                end = until if at == trained[-1] or after is None else after.time  # torchrun restarts by itself
                is_on = is_alive and after is None and start is found[-1].starts[-1]
                seconds = 0.0 if is_on else _lost_s(start if end == until else None, began, after, end, saved)
                lost.append(None if seconds is None else one.hours(max(began.time, end - seconds), end, _training))
    known = [hours for hours in lost if hours is not None]
    return {"starts": waited, "steps": sum(known) if len(known) == len(lost) else None}


def _lost_s(start: _Ranks | None, began: Start, after: Start | None, end: float, saved: _Saved) -> float | None:
    """Seconds of training that were lost at the end of a start; None if unknown."""
    if saved.between(began.time, after.time if after is not None else float("inf")):
        return 0.0
    if start is not None and start.is_noted:
        return 0.0 if start.state == "COMPLETED" else end - max(began.time, start.saved)
    return end - max(began.time, saved.newest) if after is None else after.lost_s
