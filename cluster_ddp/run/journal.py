"""The journal of a run, job.jsonl: what its jobs had of the cluster, and how the starts of their ranks ended.

The job's agent alone writes it, one line for each event; all jobs of the run add to it, and it is never cut back.

{"event": "start", "time": 1764000000.0, "job": "12", "requeue": 0, "start": 0, "id": 1764000000000, "nodes": 3,
 "training": 2, "gpus": 8, "since": 1763999998.0}
{"event": "nodes", "time": 1764000500.0, "job": "12", "nodes": 2}
{"event": "end", "time": 1764000900.0, "job": "12", "start": 0, "state": "FAILED", "status": 137, "then": "restart",
 "first": {"rank": 1, "host": "node2", "status": 137, "words": "killed by SIGKILL", "kind": "killed"}, "lost_nodes": [],
 "saved": 1764000888.0, "failed": {"node": "node2", "rank": 1, "words": "killed by SIGKILL", "kind": "killed",
 "step": null, "checkpoint": "step-00000100.pt", "on_all_ranks": false, "lost_s": 12.0, "without": [],
 "suspended": false, "micro_batch": null, "mem_mb": null}}
{"event": "over", "time": 1764001000.0, "job": "12", "saved": 1764000888.0}
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.run import outcome
from cluster_ddp.run.files import append_record, each_json_line, is_count, number
from cluster_ddp.run.names import File
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.run.start import Failed, Start


class Event:
    """Values of `event`."""

    START = "start"
    """Ranks start (`Start`): the job has `nodes` since then, or `since` earlier."""
    LINK = "link"
    """A task of a chain begins (`agent.job.chain.ChainLink`)."""
    TURN = "turn"
    """The job that holds this one starts it (`run.turns`)."""
    NODES = "nodes"
    """The job has so many `nodes` from now on."""
    END = "end"
    """A start has ended: how, and what followed (`Outcome`). If restarts were asked for and it failed, also `failed`:
    what they are decided by (`Failed`). A second one of a start replaces the first: Slurm has refused what was to
    follow."""
    OVER = "over"
    """The job has nothing from now on."""


def append(run_dir: Path, event: str, *, shared: bool, **values: Any) -> bool:
    """Append an event, of now if it has no `time`. Returns whether it is there: the disk may be full."""
    record = {"event": event, **values, "time": round(values.get("time") or time.time(), 3)}
    return append_record(run_dir / File.JOURNAL, record, shared=shared)


def events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that have a time, in this order. Damaged lines are left out."""
    for one in each_json_line(run_dir / File.JOURNAL, follows=False):
        if (at_s := number(one.get("time"))) is not None and at_s >= 0:
            yield {**one, "time": float(at_s)}


def append_end(
    run_dir: Path, ended: Outcome, *, shared: bool, saved_s: float | None = None, failed: Failed | None = None
) -> bool:
    """Append how a start has ended: now, if it has no time.

    Args:
        run_dir: the run directory.
        ended: how it ended, and what follows.
        shared: whether the group may read the file.
        saved_s: when the newest checkpoint was saved; None without one.
        failed: what restarts are decided by, if they were asked for and the start has failed.

    Returns:
        Whether it is there: the disk may be full.
    """
    values: dict[str, Any] = ended._asdict() | {"saved": saved_s}
    values["first"] = None if ended.first is None else ended.first._asdict()
    if failed is not None:
        of_start = ("time", "start", "then")
        values["failed"] = {name: value for name, value in failed._asdict().items() if name not in of_start}
    return append(run_dir, Event.END, shared=shared, **values)


def starts(run_dir: Path) -> list[Start]:
    """Return the starts of the run's jobs, in this order. Damaged events are left out."""
    found: list[Start] = []
    last: dict[tuple[str, int], int] = {}  # job, number -> where it is, of those since one began anew
    for one in events(run_dir):
        event, job = one.get("event"), str(one.get("job"))
        if event == Event.START:
            found.append(_begun(job, one))
            last = {} if found[-1].number == 0 else last
            last[job, found[-1].number] = len(found) - 1
        elif event == Event.END and (ended := outcome.of_record(one)) is not None:
            if (ended.job, ended.start) not in last:  # its beginning could not be noted: the disk was full
                found.append(Start(ended.job, ended.start))
            at = last.setdefault((ended.job, ended.start), len(found) - 1)
            found[at] = _ended(found[at], ended, one)
        elif found and found[-1].job == job and event == Event.NODES and is_count(one.get("nodes")):
            found[-1] = found[-1]._replace(nodes=(*found[-1].nodes, (one["time"], one["nodes"])))
        elif found and found[-1].job == job and event == Event.OVER:
            saved = found[-1].saved if found[-1].saved is not None else number(one.get("saved")) or 0.0
            found[-1] = found[-1]._replace(over=one["time"], saved=saved)
    return found


def last_end(run_dir: Path, job: str = "") -> Outcome | None:
    """Return how the last start of a job that has ended did; of any, without a job. None if none is known."""
    ends = [one.end for one in starts(run_dir) if one.end is not None and job in ("", one.job)]
    return ends[-1] if ends else None


def failures(run_dir: Path, job: str | None = None) -> list[Failed]:
    """Return the failures of the run's last job; none if that is not `job`. A job that begins anew has none before."""
    last: list[Start] = []
    for one in starts(run_dir):
        if one.number == 0 or (last and last[-1].job != one.job):
            last = []
        last.append(one)
    if job is not None and (not last or last[-1].job != job):
        return []
    return [one.failed for one in last if one.failed is not None]


def micro_batch(run_dir: Path) -> int | None:
    """Return the most samples of a rank in a batch that the memory of its GPU may hold; None if that is not known."""
    found = [one.failed.micro_batch for one in starts(run_dir) if one.failed is not None]
    return min((most for most in found if most is not None), default=None)


def _begun(job: str, record: Mapping[str, Any]) -> Start:
    nodes, training, gpus = (
        value if is_count(value := record.get(name)) else None for name in ("nodes", "training", "gpus")
    )
    since = number(record.get("since")) or record["time"]
    return Start(
        job=job,
        number=_whole(record.get("start")) or 0,
        id=_whole(record.get("id")),
        requeue=_whole(record.get("requeue")),
        nodes=() if nodes is None or training is None else ((since, nodes),),
        training=training or 0,
        gpus=gpus,
    )


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _ended(start: Start, ended: Outcome, record: Mapping[str, Any]) -> Start:
    failed = start.failed and start.failed._replace(then=ended.then)
    if isinstance(record.get("failed"), dict):
        failed = _failed(ended, record["failed"])
    return start._replace(end=ended, failed=failed, saved=number(record.get("saved")) or 0.0)


def _failed(ended: Outcome, record: Mapping[str, Any]) -> Failed:
    """What a line says, whatever is wrong in it."""
    rank, step, lost_s = record.get("rank"), record.get("step"), number(record.get("lost_s"))
    without = record.get("without")
    return Failed(
        time=ended.time,
        start=ended.start,
        node=_text(record, "node"),
        rank=rank if type(rank) is int else None,
        words=_text(record, "words"),
        kind=_text(record, "kind"),
        step=step if type(step) is int else None,
        checkpoint=_text(record, "checkpoint"),
        on_all_ranks=record.get("on_all_ranks") is True,
        lost_s=None if lost_s is None or lost_s < 0 else float(lost_s),
        then=ended.then,
        without=tuple(one for one in without if isinstance(one, str) and one) if isinstance(without, list) else (),
        suspended=record.get("suspended") is True,
        micro_batch=_whole(record.get("micro_batch")) or None,
        mem_mb=_whole(record.get("mem_mb")) or None,
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""
