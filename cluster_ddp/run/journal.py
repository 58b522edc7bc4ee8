"""The journal of a run, job.jsonl: what its jobs had of the cluster, and how the starts of their ranks ended.

The job's agent alone writes it, one line for each event; all jobs of the run add to it, and it is never cut back.

{"event": "start", "time": 1764000000.0, "job": "12", "requeue": 0, "start": 0, "nodes": 3, "training": 2, "gpus": 8}
{"event": "nodes", "time": 1764000500.0, "job": "12", "nodes": 2}
{"event": "end", "time": 1764000900.0, "job": "12", "start": 0, "state": "FAILED", "status": 137, "then": "restart",
 "first": {"rank": 1, "host": "node2", "status": 137, "words": "killed by SIGKILL"}, "lost_nodes": [],
 "saved": 1764000888.0, "failed": {"node": "node2", "rank": 1, "words": "killed by SIGKILL", "step": null,
 "checkpoint": "step-00000100.pt", "on_all_ranks": false, "lost_s": 12.0, "without": [], "suspended": false}}
{"event": "over", "time": 1764001000.0, "job": "12", "saved": 1764000888.0}
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.run import outcome
from cluster_ddp.run.files import append_record, each_json_line, number
from cluster_ddp.run.names import File, Then
from cluster_ddp.run.outcome import Outcome

NO_CHECKPOINT = "none"

_THEN = {Then.RESTART: "Restarted in the allocation", Then.REQUEUE: "Requeued"}


class Event:
    """Values of `event`."""

    START = "start"
    """Ranks start: the `nodes` of the job, how many of them train (`training`), the GPUs of each (`gpus`)."""
    LINK = "link"
    """A task of a chain begins (`agent.job.chain.Link`)."""
    TURN = "turn"
    """The job that holds this one starts it (`run.turns`)."""
    NODES = "nodes"
    """The job has so many `nodes` from now on."""
    END = "end"
    """A start has ended: how, and what followed (`Outcome`). If restarts were asked for and it failed, also `failed`:
    what they are decided by (`Failed`)."""
    REFUSED = "refused"
    """The job was to start again, but does not: Slurm has refused that."""
    OVER = "over"
    """The job has nothing from now on."""


class Failed(NamedTuple):
    """How one start of the ranks failed, and what followed."""

    time: float
    """When, in seconds of UNIX time."""
    start: int
    """Number of starts before it, in this job: restarts and requeues."""
    node: str
    """Where it failed first; empty if unknown."""
    rank: int | None
    """Which rank failed first; None if it was the parent of several, or a whole node."""
    words: str
    """Why, in one line; empty if only the status is known."""
    step: int | None = None
    """Step of the training at which an exception was raised; None if unknown."""
    checkpoint: str = NO_CHECKPOINT
    """Name of the newest checkpoint; "none" without one; empty if unknown, as without a run directory."""
    on_all_ranks: bool = False
    """Whether all ranks failed with these words."""
    lost_s: float | None = None
    """Seconds of the training that have to be done again: since the newest checkpoint, or the start."""
    then: str = Then.END
    """What followed: one of `Then`."""
    without: tuple[str, ...] = ()
    """Nodes that were left out from then on."""
    suspended: bool = False
    """Whether the job had been suspended just before, for minutes: ranks that wait for each other then time out."""

    @property
    def when(self) -> str:
        """When, in the local time of this machine."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))

    @property
    def text(self) -> str:
        """What failed and what followed, in words."""
        where = f" on {self.node}" if self.node else ""
        who = self.node or "Unknown rank" if self.rank is None else f"Rank {self.rank}{where}"
        then = _THEN.get(self.then, "The job ended")
        without = f", without {', '.join(self.without)}" if self.without else ""
        lost = "" if self.lost_s is None else f" Lost: {self.lost_s:.0f} s."
        return f"{who}: {self.words.rstrip('.') or 'no reason is known'}. {then}{without}.{lost}"


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


def last_end(run_dir: Path, job: str = "") -> Outcome | None:
    """Return how the last start of a job that has ended did; of any, without a job. None if none is known."""
    last: Outcome | None = None
    for one in events(run_dir):
        if one.get("event") == Event.END and job in ("", one.get("job")):
            last = outcome.of_record(one) or last
        elif one.get("event") == Event.REFUSED and last is not None and last.job == one.get("job"):
            last = last._replace(then=Then.END)
    return last


def failures(run_dir: Path, job: str | None = None) -> list[Failed]:
    """Return the failures of the run's last job; none if that is not `job`. A job that begins anew has none before."""
    last: object = None
    found: list[Failed] = []
    for one in events(run_dir):
        if one.get("job") != last or (one.get("event") == Event.START and one.get("start") == 0):
            last, found = one.get("job"), []
        if one.get("event") == Event.END and isinstance(failed := one.get("failed"), dict):
            found.append(_failed(one, failed))
        elif one.get("event") == Event.REFUSED and found:
            found[-1] = found[-1]._replace(then=Then.END)
    return found if job in (None, last) else []


def _failed(end: Mapping[str, Any], record: Mapping[str, Any]) -> Failed:
    """What a line says, whatever is wrong in it."""
    rank, step, lost_s, start = record.get("rank"), record.get("step"), number(record.get("lost_s")), end.get("start")
    without = record.get("without")
    return Failed(
        time=end["time"],
        start=start if type(start) is int else 0,
        node=_text(record, "node"),
        rank=rank if type(rank) is int else None,
        words=_text(record, "words"),
        step=step if type(step) is int else None,
        checkpoint=_text(record, "checkpoint"),
        on_all_ranks=record.get("on_all_ranks") is True,
        lost_s=None if lost_s is None or lost_s < 0 else float(lost_s),
        then=_text(end, "then"),
        without=tuple(one for one in without if isinstance(one, str) and one) if isinstance(without, list) else (),
        suspended=record.get("suspended") is True,
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""
