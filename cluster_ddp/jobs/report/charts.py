"""The charts of a report's page: which curves of its runs lie over each other; and the tasks of an array by result.

The tasks are also a picture in parallel coordinates (Inselberg 1985).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_ddp.jobs.report import time_series
from cluster_ddp.jobs.report.array_tasks import columns, differing, ranked
from cluster_ddp.jobs.report.summary import Report
from cluster_ddp.jobs.report.time_series import Curve, Curves
from cluster_ddp.jobs.status import RunStatus

_LOGGED = {
    "train loss": ("Loss", ""),
    "test loss": ("Loss", ""),
    "test accuracy": ("Accuracy", "%"),
    "train accuracy": ("Accuracy", "%"),
    "train lr": ("Learning rate", ""),
}
_RANKS = "Step of each rank, without communication"
# Of a "steps" record: title, unit, factor, label, and whether the line is dashed.
_OF_STEPS = {
    "samples_per_s": ("Throughput", "samples/s", 1.0, "", False),
    "step_s": ("Step", "ms", 1000.0, "", False),
    "rank_s_max": (_RANKS, "ms", 1000.0, "slowest", False),
    "rank_s_min": (_RANKS, "ms", 1000.0, "fastest", True),
}
_OF_NODES = {
    name: {"title": title, "unit": unit, "x": "time", "zero": True}
    for name, title, unit in (
        ("gpu", "GPUs busy", "%"),
        ("cpu", "CPUs busy", "%"),
        ("gpu_memory", "GPU memory", "GiB"),
        ("memory", "Memory", "GiB"),
        ("received_per_s", "Network, received", "MiB/s"),
        ("sent_per_s", "Network, sent", "MiB/s"),
    )
}
_STEPS_SAY_IT_BETTER = ("train waiting_for_data", "train samples_per_s")
_TITLES_OF_NODES = [chart["title"] for chart in _OF_NODES.values()]
_ORDER = ("Loss", "Accuracy", "Throughput", "Step", _RANKS, *_TITLES_OF_NODES, "Learning rate")
# The picture of an array's tasks, in pixels.
_WIDTH, _HEIGHT, _TOP, _SIDE, _TEXT = 900.0, 260.0, 34.0, 70.0, 14.0
_MOST_OTHERS = 12  # further charts, of what a training logs besides

Points = list[tuple[float, "float | None"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run on the page."""

    name: str
    """As it is called on the page."""
    found: Report
    """Its report."""
    curves: Curves
    """Its figures over time."""
    description: Mapping[str, Any]
    """Its run.json; empty without one."""


# A chart without its curves; a label for one of them; that curve.
Drawn = tuple[dict[str, Any], str, dict[str, Any]]


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts that have a curve, as the page's script takes them; each of several runs has its own colour."""
    several = len(runs) > 1
    kinds = {run.curves.over for run in runs if run.curves.logged}
    over = next((over for over in ("time", "step", "epoch") if over in kinds), "time")
    made: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        logged = _logged(run) if run.curves.over == over else ()
        nodes = _nodes_together(run) if several else _each_node(run)
        for chart, label, curve in (*logged, *_steps(run), *nodes, *_printed(run)):
            name = " ".join(filter(None, (run.name if several else "", label))) or chart["title"]
            into = made.setdefault(chart["title"], {**chart, "curves": []})
            into["curves"].append({"label": name, **curve, "colour": curve.get("colour", number)})
    found = {title: chart for title, chart in made.items() if _has_values(chart)}
    others = [chart for title, chart in found.items() if title not in _ORDER][:_MOST_OTHERS]
    return [found[title] for title in _ORDER if title in found] + others


def _has_values(chart: Mapping[str, Any]) -> bool:
    """Whether a chart shows anything: of amounts that begin at 0, such as the network's, more than 0."""
    values = [y for curve in chart["curves"] for _, y in curve["points"] if y is not None]
    return any(values) if chart.get("zero") and chart["unit"] != "%" else bool(values)


def _logged(run: Run) -> Iterator[Drawn]:
    """What the training has logged."""
    begin = run.curves.began_s if run.curves.over == "time" else 0.0
    for name in sorted(run.curves.logged, key=lambda name: (name not in _LOGGED, name)):
        if name in _STEPS_SAY_IT_BETTER and run.curves.by_time:
            continue
        title, unit = _LOGGED.get(name, (name, ""))
        points = _scaled(run.curves.logged[name].points(begin), 100 if unit == "%" else 1)
        label = name.partition(" ")[0] if title == "Loss" else ""
        chart = {"title": title, "unit": unit, "x": run.curves.over}
        yield chart, label, {"points": points, "dashed": name.startswith("test ")}


def _steps(run: Run) -> Iterator[Drawn]:
    """The times of the steps."""
    for name, (title, unit, factor, label, dashed) in _OF_STEPS.items():
        if name in run.curves.by_time:
            points = _scaled(_of_time(run, run.curves.by_time[name]), factor)
            yield {"title": title, "unit": unit, "x": "time"}, label, {"points": points, "dashed": dashed}


def _nodes_together(run: Run) -> Iterator[Drawn]:
    """How the nodes were used: the mean over them."""
    for name, chart in _OF_NODES.items():
        points = _of_time(run, time_series.mean(run.curves.of_nodes.get(name, {}).values()))
        yield chart, "", {"points": points}


def _each_node(run: Run) -> Iterator[Drawn]:
    """How each node was used; each has a colour of its own."""
    for name, chart in _OF_NODES.items():
        for at, (node, curve) in enumerate(run.curves.of_nodes.get(name, {}).items()):
            edges = {edge: run.curves.of_nodes.get(f"{name} {edge}", {}).get(node) for edge in ("least", "most")}
            known = {edge: _of_time(run, one) for edge, one in edges.items() if one is not None}
            yield chart, node, {"points": _of_time(run, curve), "colour": at, **known}


def _printed(run: Run) -> Iterator[Drawn]:
    """The figures that it has printed, in their order: nothing says when it was."""
    for name, values in run.found.printed.items():
        curve = Curve()
        for at, value in enumerate(values, 1):
            curve.add(at, value)
        yield {"title": f"{name}, printed", "unit": "", "x": "number"}, "", {"points": curve.points()}


def _of_time(run: Run, curve: Curve) -> Points:
    """The points of a curve over time, with a gap where the run waited to be started again."""
    began_s = run.curves.began_s
    starts = [round(start.time - began_s, 4) - 0.001 for start in run.found.training.starts[1:]]
    points: Points = [*curve.points(began_s), *((start, None) for start in starts)]
    return sorted(points, key=lambda point: point[0])


def _scaled(points: Points, factor: float) -> Points:
    return [(x, None if y is None else float(f"{y * factor:.6g}")) for x, y in points]


def grid(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Return the table and the picture of the tasks of arrays, the best first; None without two."""
    runs = [one for one in reports if one.status.values or "_" in one.status.job]
    if len(runs) < 2:
        return None
    ranking = ranked([one.training.results for one in runs])
    best_first = [runs[at].status for at in ranking.order]
    axes: list[tuple[str, Sequence[Any]]] = []
    if ranking.by is not None:
        options = differing([one.status.values for one in runs])
        axes = [(key, [one.values.get(key) for one in best_first]) for key in options]
        factor, unit = (100, ", %") if ranking.by == "accuracy" else (1, "")
        values = (ranking.values[ranking.by][at] for at in ranking.order)
        axes.append((ranking.title(ranking.by) + unit, [None if one is None else factor * one for one in values]))
    return {
        "columns": columns(runs, ranking),
        "tasks": len(runs),
        "is_ranked": ranking.by is not None,
        "picture": _picture(axes, best_first) if len(axes) > 1 else None,
    }


def _picture(columns: Sequence[tuple[str, Sequence[Any]]], ranked: Sequence[RunStatus]) -> dict[str, Any]:
    """The axes with their marks, and a line for each run whose values are all known."""
    gap = (_WIDTH - 2 * _SIDE) / max(1, len(columns) - 1)
    axes, heights = [], []
    for at, (name, values) in enumerate(columns):
        places = _places(values)
        heights.append([None if value is None else places[value] for value in values])
        labels = [(f"{mark:.4g}" if isinstance(mark, float) else str(mark)[:12], y) for mark, y in _apart(places)]
        axes.append({"name": name, "x": _SIDE + at * gap, "marks": labels, "last": at == len(columns) - 1})
    lines = []
    for number, (status, places_of) in enumerate(zip(ranked, zip(*heights))):
        if None not in places_of:
            points = " ".join(f"{axis['x']:.1f},{y:.1f}" for axis, y in zip(axes, places_of))
            words = " ".join(f"{key}={value}" for key, value in status.values.items())
            worse = round(number / max(1, len(ranked) - 1), 3)
            lines.append({"points": points, "title": f"{words}: {columns[-1][1][number]:.4g}", "worse": worse})
    return {"axes": axes, "lines": lines[::-1], "top": _TOP, "width": _WIDTH, "height": _HEIGHT}  # the best on top


def _apart(places: dict[Any, float]) -> list[tuple[Any, float]]:
    """The marks of an axis, from the top, without those that would cover one above."""
    shown: list[tuple[Any, float]] = []
    for mark, y in sorted(places.items(), key=lambda item: item[1]):
        if not shown or y - shown[-1][1] >= _TEXT:
            shown.append((mark, y))
    return shown


def _places(values: Sequence[Any]) -> dict[Any, float]:
    """Where the values of an axis lie: numbers in proportion, other words and few numbers one below the other."""
    known = {value for value in values if value is not None}
    bottom = _HEIGHT - 14
    if all(isinstance(value, float) for value in known):
        least, most = min(known, default=0.0), max(known, default=1.0)
        span = most - least or 1.0
        return {value: bottom - (bottom - _TOP) * (value - least) / span for value in known}
    ordered = sorted(known, key=_as_number)
    step = (bottom - _TOP) / max(1, len(ordered) - 1)
    return {value: bottom - number * step for number, value in enumerate(ordered)}


def _as_number(word: str) -> tuple[bool, float, str]:
    try:
        return (False, float(word), word)
    except ValueError:
        return (True, 0.0, word)
