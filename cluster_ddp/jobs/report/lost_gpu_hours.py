"""The GPU hours of a run, over all its jobs, requeues and restarts, and what was lost of them.

job.jsonl says how many nodes its jobs had, from when on, and when their ranks started and ended. starts.jsonl
says when the training itself began in these starts.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster_ddp.jobs.report import training_stats, usage
from cluster_ddp.jobs.report.training_stats import TrainingStats
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.run import journal
from cluster_ddp.run.files import json_lines, number
from cluster_ddp.run.names import File
from cluster_ddp.run.start import Start
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


class _Allocation:
    """What a job had, from a start by Slurm to a requeue or its end; `starts` are those of its ranks."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self.starts, self.had = starts, list[tuple[float, int, int]]()
        """In `had`: from when on how many nodes, and how many of them to train."""
        for start in self.starts:
            for at, nodes in start.nodes:  # by a clock that was set back, from the change before on
                self.had.append((max([at, *(before for before, *_ in self.had[-1:])]), nodes, start.training))
        self.since = self.had[0][0]
        """When it began."""
        over = starts[-1].over
        self.over = None if over is None else max(over, self.since)
        """When it ended; None if nobody has noted that."""

    @property
    def ends(self) -> list[float]:
        """When each of its starts ended: as noted, or else when the next one began, or it ended."""
        then = [*(one.nodes[0][0] for one in self.starts[1:]), self.over or self.since]
        return [one.end.time if one.end is not None else at for one, at in zip(self.starts, then)]

    def hours(self, since: float, until: float) -> tuple[float, float]:
        """Return the GPU hours of all nodes in a stretch of time, and of those that train."""
        of_all = of_training = 0.0
        for at in range(max(0, bisect_right(self.had, (since, _NEVER)) - 1), len(self.had)):
            began, nodes, training = self.had[at]
            if began >= until:
                break
            end = self.had[at + 1][0] if at + 1 < len(self.had) else until
            gpu_hours = max(0.0, min(end, until) - max(began, since)) * (self.starts[0].gpus or 0) / 3600
            of_all += nodes * gpu_hours
            of_training += min(nodes, training) * gpu_hours
        return of_all, of_training


def read(status: RunStatus, training: TrainingStats) -> tuple[float | None, float | None, str]:
    """Return the GPU hours of a run, what was lost of them, and where most of that, in words. None: unknown."""
    run_dir = status.run_dir or Path()
    found = _allocations(run_dir)
    last = found[-1].starts[-1] if found else None
    is_last = last is not None and status.job in ("", last.job) and status.requeues in (None, last.requeue)
    is_alive = is_last and status.state in ("RUNNING", "COMPLETING")
    if is_last and found[-1].over is None:  # the agent was killed or lost, or still runs
        if is_alive:
            found[-1].over = time.time()
        elif status.state in FINAL_STATES and status.elapsed:
            found[-1].over = found[-1].since + elapsed_s(status.elapsed)
    if any(one.over is None for one in found):
        _add_ends(found, run_dir)
    if not found or any(one.starts[0].gpus is None or one.over is None for one in found):
        return None, None, ""
    lost: dict[str, float | None] = _lost(found, training, run_dir, is_alive=is_alive) if training.starts else {}
    of_all, of_training = map(sum, zip(*(one.hours(one.since, one.over or 0.0) for one in found)))
    if training.saves_s is not None and of_all:
        lost["saves"] = training.saves_s * of_training / sum((one.over or 0.0) - one.since for one in found)
    lost["spares"] = of_all - of_training
    known = {cause: hours for cause, hours in lost.items() if hours is not None}
    if known.keys() != _CAUSES.keys():
        return of_all, None, ""
    most = max(known, key=lambda cause: known[cause])
    return of_all, sum(known.values()), _CAUSES[most] if known[most] else ""


def _allocations(run_dir: Path) -> list[_Allocation]:
    of_each: list[list[Start]] = []
    for start in journal.starts(run_dir):
        if not start.nodes:
            continue
        before = of_each[-1][-1] if of_each else None
        if before is not None and before.over is None and (before.job, before.requeue) == (start.job, start.requeue):
            of_each[-1].append(start)
            continue
        if before is not None and before.over is not None:  # a batch script may launch several times
            start = start._replace(nodes=tuple((max(at, before.over), nodes) for at, nodes in start.nodes))
        of_each.append([start])
    return [_Allocation(starts) for starts in of_each]


def _add_ends(found: Sequence[_Allocation], run_dir: Path) -> None:
    """Fill in the ends that nobody has noted: that of an allocation is the last time at which its ranks wrote."""
    written: dict[object, float] = {}
    samples = usage.records(run_dir, last_bytes=_SAMPLES)
    for records in (samples, json_lines(run_dir / File.STARTS)):
        for record in records:
            at, start = number(record.get("time")) or 0.0, record.get("start_id")
            written[start] = max(at, written.get(start, 0.0))
    for one in found:
        last_s = max((written.get(start.id, 0.0) for start in one.starts if start.id is not None), default=0.0)
        if one.over is None and last_s >= one.starts[-1].nodes[0][0]:
            one.over = last_s


def _lost(
    found: Sequence[_Allocation], training: TrainingStats, run_dir: Path, *, is_alive: bool
) -> dict[str, float | None]:
    """The GPU hours until the training began, and those of steps that were lost; None if one is unknown."""
    waited, lost = 0.0, list[float | None]()
    newest = 0.0
    with suppress(OSError):
        newest = (run_dir / File.PROGRESS).stat().st_mtime
    trainings = dict[int, list[tuple[training_stats.TrainingStart, training_stats.TrainingStart | None]]]()
    for began, after in zip(training.starts, [*training.starts[1:], None]):
        if began.id is not None:
            trainings.setdefault(began.id, []).append((began, after))
    for one in found:
        since = one.since
        for start, until in zip(one.starts, one.ends):
            trained = [] if start.id is None else trainings.get(start.id, [])
            waited += one.hours(since, trained[0][0].time if trained else until)[1]
            since = until
            for began, after in trained:
                is_same = after is not None and after.id == start.id  # torchrun restarts by itself
                end = after.time if after is not None and is_same else until
                is_on = is_alive and after is None and start is found[-1].starts[-1]
                seconds: float | None
                if began.has_saved or is_on:
                    seconds = 0.0
                elif not is_same and start.saved is not None:
                    is_whole = start.end is not None and start.end.state == "COMPLETED"
                    seconds = 0.0 if is_whole else end - max(began.time, start.saved)
                else:
                    seconds = end - max(began.time, newest) if after is None else after.lost_s
                lost.append(None if seconds is None else one.hours(max(began.time, end - seconds), end)[1])
    known = [hours for hours in lost if hours is not None]
    return {"starts": waited, "steps": sum(known) if len(known) == len(lost) else None}
