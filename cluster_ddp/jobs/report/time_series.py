"""The figures of a run over time, as curves of at most a thousand points, and its starts as a time line."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster_ddp.errors import hours
from cluster_ddp.jobs.report import usage
from cluster_ddp.jobs.report.training_stats import TrainingStart
from cluster_ddp.run.files import each_json_line, number
from cluster_ddp.run.names import GLOBAL_STEP, OF_FIRST_RECORD, File, Record
from cluster_ddp.run.start import Failed

POINTS = 1000
"""A curve with more points is thinned: of each stretch, its least and its greatest value stay."""
_GIB, _MIB = 1 << 30, 1 << 20
_STRETCH_S = 10.0
_PAUSE_S = 5.0  # the least one that counts
_FAILURE_WIDTH = 0.4  # per cent of the time line
_NOT_PLOTTED = {"kind", "time", "epoch", "step", GLOBAL_STEP, *OF_FIRST_RECORD, "samples", "correct"}
_PLACES = ("time", "epoch", "samples", GLOBAL_STEP)
_OVER: dict[Literal["epoch", "step", "time"], str] = {"epoch": "epoch", "step": GLOBAL_STEP, "time": "time"}
_OF_STEPS = {"step_s", "samples_per_s", "samples_per_s_per_rank", "rank_s_min", "rank_s_max"}


@dataclass(slots=True)
class Curve:
    """Values over time or epochs. A non-finite value is NaN: a gap."""

    x: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of UNIX time; epochs where that is said."""
    y: array[float] = field(default_factory=lambda: array("d"))
    """The values."""
    since: array[float] = field(default_factory=lambda: array("d"))
    """Where the stretch begins that a value is of; -inf if not known."""

    def add(self, x: object, y: object, *, over: object = None) -> None:
        """Append a point, if both are numbers, and x is a finite one; `over` is the length of its stretch, if known."""
        if _is_number(x) and isinstance(y, (int, float)):
            self.x.append(float(x))  # type: ignore[arg-type]
            self.y.append(float(y) if math.isfinite(y) else math.nan)
            self.since.append(self.x[-1] - float(over) if _is_number(over) else -math.inf)  # type: ignore[arg-type]

    def pauses(self) -> list[float]:
        """Return where each pause ends: a stretch that no value is of."""
        order = sorted(range(len(self.x)), key=self.x.__getitem__)
        return [self.since[at] for last, at in itertools.pairwise(order) if self.since[at] > self.x[last] + _PAUSE_S]

    def points(self, begin: float = 0.0) -> list[tuple[float, float | None]]:
        """Return the points, in ascending order of x - `begin`, thinned to `POINTS`. None stands for a gap."""
        order = sorted(range(len(self.x)), key=self.x.__getitem__)
        if len(order) > POINTS:
            order = _thinned(order, self.y)
        pairs = [(self.x[at] - begin, self.y[at]) for at in order]
        pairs += [(end - begin, math.nan) for end in self.pauses()]
        return [(round(x, 4), None if math.isnan(y) else float(f"{y:.6g}")) for x, y in sorted(pairs)]


@dataclass(slots=True)
class Curves:
    """All curves of a run, by name."""

    logged: dict[str, Curve] = field(default_factory=dict)
    """Loss, accuracy and other figures of the training, over `over`."""
    over: Literal["epoch", "step", "time"] = "time"
    """What `logged` is over: epochs, steps since the training began, or time, whichever all records say."""
    by_time: dict[str, Curve] = field(default_factory=dict)
    """Times of the steps, throughput."""
    of_nodes: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """By name of a figure, then of the node: its use, and of its GPUs mean, minimum and maximum."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """When records were written; UNIX time."""

    @property
    def began_s(self) -> float:
        """When the first record was written; 0 without one."""
        return min(self.times, default=0.0)

    def note_time(self, record: Mapping[str, Any]) -> None:
        """Note when a record was written, if it says."""
        if _is_number(record.get("time")):
            self.times.append(float(record["time"]))


def read(run_dir: Path) -> Curves:
    """Return the curves of a run."""
    found = Curves()
    logged: dict[str, _Logged] = {}
    epoch_size = 0.0
    for record in each_json_line(run_dir / File.METRICS):
        found.note_time(record)
        kind = record.get("kind")
        if kind == Record.STEPS:
            for name in _OF_STEPS & record.keys():
                found.by_time.setdefault(name, Curve()).add(record.get("time"), record[name])
            continue
        if kind == Record.TRAIN and _is_number(record.get("samples")):
            epoch_size = max(epoch_size, record["samples"])
        for name in record.keys() - _NOT_PLOTTED:
            if isinstance(record[name], (int, float)) and not isinstance(record[name], bool):
                logged.setdefault(f"{kind} {name}", _Logged()).add(record, record[name])
            elif record[name] is None and f"{kind} {name}" in logged:  # it was not finite
                logged[f"{kind} {name}"].add(record, math.nan)
    _place(found, logged, epoch_size)
    for record in usage.records(run_dir):
        found.note_time(record)
        for name, value in _used(record).items():
            curve = found.of_nodes.setdefault(name, {}).setdefault(record["node"], Curve())
            curve.add(record.get("time"), value, over=record.get("seconds"))
    return found


class _Logged:
    """The values that a training has logged by one name, each with its place in the training; NaN if not given."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in (*_PLACES, "value")}

    def add(self, record: Mapping[str, Any], value: float) -> None:
        self.columns["value"].append(value)
        for name in _PLACES:
            self.columns[name].append(record[name] if _is_number(record.get(name)) else math.nan)


def _place(found: Curves, logged: Mapping[str, _Logged], epoch_size: float) -> None:
    """Put what was logged over epochs, steps or time."""
    for over, column in _OVER.items():
        if not any(math.isnan(place) for one in logged.values() for place in one.columns[column]):
            found.over = over
            break
    for name, one in sorted(logged.items()):
        curve = found.logged.setdefault(name, Curve())
        is_within = found.over == "epoch" and name.startswith(f"{Record.TRAIN} ") and epoch_size > 0
        for place, samples, value in zip(one.columns[_OVER[found.over]], one.columns["samples"], one.columns["value"]):
            curve.add(place - 1 + samples / epoch_size if is_within and not math.isnan(samples) else place, value)


def _used(record: Mapping[str, Any]) -> dict[str, float]:
    """A sample of a node in the units of the page; of its GPUs mean, minimum and maximum."""
    units = {"memory": _GIB, "received_per_s": _MIB, "sent_per_s": _MIB}
    found = {
        "cpu": 100 * record["cpu"],
        **{name: record[name] / unit for name, unit in units.items() if name in record},
    }
    for name, key, scale in (("gpu", "utilization", 100.0), ("gpu_memory", "memory", 1 / _GIB)):
        if known := [gpu[key] for gpu in record["gpus"] if _is_number(gpu.get(key))]:
            found |= {name: scale * _mean(known)}
            found |= {f"{name} least": scale * min(known), f"{name} most": scale * max(known)}
    return found


def mean(curves: Iterable[Curve]) -> Curve:
    """Return the mean of curves, such as those of a run's nodes, in each stretch of ten seconds."""
    sums: dict[int, list[float]] = {}
    for curve in curves:
        for x, y in zip(curve.x, curve.y):
            sums.setdefault(int(x // _STRETCH_S), []).append(y)
    found = Curve()
    for stretch, values in sorted(sums.items()):
        found.add(stretch * _STRETCH_S, _mean(values), over=2 * _STRETCH_S)  # some stretches have no sample
    return found


def timeline(curves: Curves, starts: Sequence[TrainingStart], failures: Sequence[Failed]) -> list[dict[str, Any]]:
    """Return the stretches of time of a run that was started again: training, what was done again, waiting; failures.

    Each has a kind, a title, and x and width in per cent of the whole; none without two starts.
    """
    times = sorted(curves.times)
    if len(starts) < 2 or not times:
        return []
    begin, end = starts[0].time, max(times[-1], starts[-1].time + 1)
    found = []
    for start, after in zip(starts, [*starts[1:], None]):
        last = times[max(0, bisect.bisect_left(times, _woke_s(curves, start, after)) - 1)] if after else end
        lost_s = min(after.lost_s or 0.0, max(0.0, last - start.time)) if after else 0.0
        stretches = [("training", start.time, max(start.time, last - lost_s)), ("done again", last - lost_s, last)]
        stretches += [("waiting", last, after.time)] if after else []
        for kind, since, until in stretches:
            if until > since:
                share = {"x": 100 * (since - begin) / (end - begin), "width": 100 * (until - since) / (end - begin)}
                found.append({"kind": kind, "title": f"{kind}: {hours(until - since)}", **share})
    for one in failures:
        x = 100 * (min(max(one.time, begin), end) - begin) / (end - begin)
        found.append({"kind": "failed", "title": one.text, "x": x - _FAILURE_WIDTH / 2, "width": _FAILURE_WIDTH})
    return found


def _woke_s(curves: Curves, start: TrainingStart, after: TrainingStart) -> float:
    """When the job of a start began: its nodes are sampled some time before its training starts."""
    woke = [end_s for curve in curves.of_nodes.get("cpu", {}).values() for end_s in curve.pauses()]
    return min((end_s for end_s in woke if start.time < end_s <= after.time), default=after.time)


def _thinned(order: Sequence[int], values: Sequence[float]) -> list[int]:
    """Of each of POINTS / 2 stretches the least and the greatest value; the first and the last point stay, too."""
    stretches = POINTS // 2 - 1
    kept = {order[0], order[-1]}
    for at in range(stretches):
        stretch = order[at * len(order) // stretches : (at + 1) * len(order) // stretches]
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return [at for at in order if at in kept]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_number(value: object) -> bool:
    return number(value, math.inf) is not None
