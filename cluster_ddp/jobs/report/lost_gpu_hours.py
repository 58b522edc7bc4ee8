"""The GPU hours of a run, over all its jobs, requeues and restarts, and what was lost of them.

job.jsonl says how many nodes its jobs had, from when on, and when their ranks started and ended. starts.jsonl
says when the training itself began in these starts.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.jobs.report import usage
from cluster_ddp.jobs.report.training_stats import Start, Training
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.run import journal
from cluster_ddp.run.files import is_count, json_lines, number
from cluster_ddp.run.journal import Event
from cluster_ddp.run.names import File
from cluster_ddp.slurm.job_status import FINAL_STATES, elapsed_s

# Where GPU hours are lost: from Slurm's start of a job, or the end of the ranks before, until the training began
# (imports, rendezvous, loading); after the newest checkpoint of a start that failed; on spare nodes; in saves.
_CAUSES = {
    "starts": "before the training began",
    "steps": "in steps after the newest checkpoint",
    "spares": "by nodes that waited",
    "saves": "in saves",
}

_SAMPLES = 16 << 20  # bytes of a node's, of two days
_NEVER = float("inf")


@dataclass(kw_only=True, slots=True)
class _Ranks:
    """A start of the ranks. Times are seconds of UNIX time."""

    since: float
    until: float | None = None
    """When they ended; else, once all is read, when the next ones started, or when their job was over."""
    state: object = None
    """How they ended, as the agent says."""
    saved: float | None = None
    """When the newest checkpoint was saved, at their end; None if the agent has noted neither that nor the job's."""


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

    def hours(self, since: float, until: float) -> tuple[float, float]:
        """Return the GPU hours of all nodes in a stretch of time, and of those that train."""
        of_all = of_training = 0.0
        for at in range(max(0, bisect_right(self.had, (since, _NEVER)) - 1), len(self.had)):
            began, nodes, training = self.had[at]
            if began >= until:
                break
            end = self.had[at + 1][0] if at + 1 < len(self.had) else until
            gpu_hours = max(0.0, min(end, until) - max(began, since)) * (self.gpus or 0) / 3600
            of_all += nodes * gpu_hours
            of_training += min(nodes, training) * gpu_hours
        return of_all, of_training


def read(status: RunStatus, training: Training) -> tuple[float | None, float | None, str]:
    """Return the GPU hours of a run, what was lost of them, and where most of that, in words. None: unknown."""
    run_dir = status.run_dir or Path()
    found, notes = _allocations(run_dir), json_lines(run_dir / File.STARTS)
    is_last = bool(found) and status.job in ("", found[-1].key[0]) and status.requeues in (None, found[-1].key[1])
    is_alive = is_last and status.state in ("RUNNING", "COMPLETING")
    if is_last and found[-1].over is None:  # the agent was killed or lost, or still runs
        if is_alive:
            found[-1].over = time.time()
        elif status.state in FINAL_STATES and status.elapsed:
            found[-1].over = found[-1].since + elapsed_s(status.elapsed)
    _add_ends(found, run_dir, notes)
    if not found or any(one.gpus is None or one.over is None for one in found):
        return None, None, ""
    lost: dict[str, float | None] = _lost(found, training, run_dir, notes, is_alive=is_alive) if training.starts else {}
    of_all, of_training = map(sum, zip(*(one.hours(one.since, one.over or 0.0) for one in found)))
    if training.saves_s is not None and of_all:
        lost["saves"] = training.saves_s * of_training / sum((one.over or 0.0) - one.since for one in found)
    lost["spares"] = of_all - of_training
    known = {cause: hours for cause, hours in lost.items() if hours is not None}
    if known.keys() != _CAUSES.keys():
        return of_all, None, ""
    most = max(known, key=lambda cause: known[cause])
    return of_all, sum(known.values()), _CAUSES[most] if known[most] else ""


def training_nodes(run_dir: Path) -> dict[usage.StartOf, int]:
    """Return on how many nodes each start trained, of those that were noted."""
    notes = [one for one in journal.events(run_dir) if one.get("event") == Event.START]
    known = {(str(one.get("job")), number(one.get("start"))): one.get("training") for one in notes}
    return {start: nodes for start, nodes in known.items() if type(nodes) is int}


def _allocations(run_dir: Path) -> list[_Allocation]:
    found: list[_Allocation] = []
    for record in journal.events(run_dir):
        event, at = record.get("event"), record["time"]
        one = found[-1] if found and found[-1].over is None else None
        if event == Event.START and is_count(record.get("nodes")) and is_count(record.get("training")):
            key, gpus = (record.get("job"), record.get("requeue")), record.get("gpus")
            if one is None or one.key != key:
                at = max(at, (found[-1].over or at) if found else at)  # a batch script may launch several times
                one = _Allocation(key=key, gpus=gpus if is_count(gpus) else None)
                found.append(one)
            one.starts.append(_Ranks(since=at))
            one.add(at, record["nodes"], record["training"])
        elif one is not None:
            if event == Event.NODES and is_count(record.get("nodes")):
                one.add(at, record["nodes"], one.had[-1][2])
            if event in (Event.END, Event.OVER) and (start := one.starts[-1]).until is None:
                start.until, start.state, start.saved = at, record.get("state"), number(record.get("saved")) or 0.0
            if event == Event.OVER:
                one.over = max(at, one.since)
    return found


def _add_ends(found: Sequence[_Allocation], run_dir: Path, notes: Sequence[Mapping[str, Any]]) -> None:
    """Fill in the ends that nobody has noted: that of an allocation is the last time at which its ranks wrote."""
    written: list[float] = []
    if any(one.over is None for one in found):
        samples = usage.records(run_dir, last_bytes=_SAMPLES)
        times = (number(record.get("time")) for records in (samples, notes) for record in records)
        written = sorted(at for at in times if at is not None)
    for one, after in zip(found, [*found[1:], None]):
        if one.over is None and (count := bisect_left(written, _NEVER if after is None else after.since)):
            one.over = written[count - 1] if written[count - 1] >= one.starts[-1].since else None
        for start, then in zip(one.starts, [*(start.since for start in one.starts[1:]), one.over]):
            start.until = then if start.until is None else start.until


def _lost(
    found: Sequence[_Allocation], training: Training, run_dir: Path, notes: Sequence[Mapping[str, Any]], is_alive: bool
) -> dict[str, float | None]:
    """The GPU hours until the training began, and those of steps that were lost; None if one is unknown."""
    waited, lost = 0.0, list[float | None]()
    saved = sorted(number(one.get("time")) or 0.0 for one in notes if one.get("kind") == "end" and one.get("saved"))
    newest = 0.0
    with suppress(OSError):
        newest = (run_dir / File.PROGRESS).stat().st_mtime
    times = sorted((each.time, at) for at, each in enumerate(training.starts))
    for one in found:
        since = one.since
        for start in one.starts:
            until = start.until or start.since
            trained = sorted(at for _, at in times[bisect_left(times, (start.since,)) : bisect_left(times, (until,))])
            waited += one.hours(since, training.starts[trained[0]].time if trained else until)[1]
            since = until
            for at in trained:
                began, after = training.starts[at], next(iter(training.starts[at + 1 : at + 2]), None)
                end = until if at == trained[-1] or after is None else after.time  # torchrun restarts by itself
                is_on = is_alive and after is None and start is found[-1].starts[-1]
                had_saved = bisect_left(saved, began.time) < bisect_left(saved, _NEVER if after is None else after.time)
                seconds: float | None = 0.0
                if not (is_on or had_saved):
                    seconds = _lost_s(start if end == until else None, began, after, end, newest)
                lost.append(None if seconds is None else one.hours(max(began.time, end - seconds), end)[1])
    known = [hours for hours in lost if hours is not None]
    return {"starts": waited, "steps": sum(known) if len(known) == len(lost) else None}


def _lost_s(start: _Ranks | None, began: Start, after: Start | None, end: float, newest: float) -> float | None:
    """Seconds of training that were lost at the end of a start that had not just saved all; None if unknown."""
    if start is not None and start.saved is not None:
        return 0.0 if start.state == "COMPLETED" else end - max(began.time, start.saved)
    return end - max(began.time, newest) if after is None else after.lost_s
