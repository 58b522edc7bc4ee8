"""The charts of a report's page: which curves of its runs lie over each other, and how they look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_ddp.jobs.report import series
from cluster_ddp.jobs.report.series import Curve, Curves
from cluster_ddp.jobs.report.summary import Report

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
    "gpu": ("GPUs busy", "%"),
    "cpu": ("CPUs busy", "%"),
    "gpu_memory": ("GPU memory", "GiB"),
    "memory": ("Memory", "GiB"),
    "received_per_s": ("Network, received", "MiB/s"),
    "sent_per_s": ("Network, sent", "MiB/s"),
}
_STEPS_SAY_IT_BETTER = ("train waiting_for_data", "train samples_per_s")
_ORDER = (
    "Loss",
    "Accuracy",
    "Throughput",
    "Step",
    _RANKS,
    *(title for title, _ in _OF_NODES.values()),
    "Learning rate",
)
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


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts that have a curve, as the page's script takes them."""
    made = _Charts(several=len(runs) > 1)
    kinds = {run.curves.over for run in runs if run.curves.logged}
    over = next((over for over in ("time", "step", "epoch") if over in kinds), "time")
    for number, run in enumerate(runs):
        if run.curves.over == over:
            made.add_logged(number, run)
        made.add_steps(number, run)
        made.add_nodes(number, run)
        made.add_printed(number, run)
    found = {title: chart for title, chart in made.by_title.items() if _has_values(chart)}
    others = [chart for title, chart in found.items() if title not in _ORDER][:_MOST_OTHERS]
    return [found[title] for title in _ORDER if title in found] + others


def _has_values(chart: Mapping[str, Any]) -> bool:
    """Whether a chart shows anything: of amounts that begin at 0, such as the network's, more than 0."""
    values = [y for curve in chart["curves"] for _, y in curve["points"] if y is not None]
    return any(values) if chart.get("zero") and chart["unit"] != "%" else bool(values)


class _Charts:
    """The charts so far, by title.

    Args:
        several: whether they show several runs, each in a colour of its own.
    """

    def __init__(self, *, several: bool) -> None:
        self.several = several
        self.by_title: dict[str, dict[str, Any]] = {}

    def add_logged(self, number: int, run: Run) -> None:
        """Add what the training of a run has logged."""
        curves = run.curves
        begin = curves.began_s if curves.over == "time" else 0.0
        for name in sorted(curves.logged, key=lambda name: (name not in _LOGGED, name)):
            if name in _STEPS_SAY_IT_BETTER and curves.by_time:
                continue
            title, unit = _LOGGED.get(name, (name, ""))
            points = _scaled(curves.logged[name].points(begin), 100 if unit == "%" else 1)
            label = name.partition(" ")[0] if title == "Loss" else ""
            look = {"dashed": name.startswith("test "), "colour": number}
            self._add({"title": title, "unit": unit, "x": curves.over}, run, label, points, look)

    def add_steps(self, number: int, run: Run) -> None:
        """Add the times of a run's steps."""
        for name, (title, unit, factor, label, dashed) in _OF_STEPS.items():
            if name in run.curves.by_time:
                points = _scaled(_of_time(run, run.curves.by_time[name]), factor)
                look = {"dashed": dashed, "colour": number}
                self._add({"title": title, "unit": unit, "x": "time"}, run, label, points, look)

    def add_nodes(self, number: int, run: Run) -> None:
        """Add how a run's nodes were used: of several runs the mean over their nodes."""
        for name, (title, unit) in _OF_NODES.items():
            of_nodes, chart = (
                run.curves.of_nodes.get(name, {}),
                {"title": title, "unit": unit, "x": "time", "zero": True},
            )
            if self.several:
                self._add(chart, run, "", _of_time(run, series.mean(of_nodes.values())), {"colour": number})
                continue
            for at, (node, curve) in enumerate(of_nodes.items()):
                edges = {edge: run.curves.of_nodes.get(f"{name} {edge}", {}).get(node) for edge in ("least", "most")}
                known = {edge: _of_time(run, one) for edge, one in edges.items() if one is not None}
                self._add(chart, run, node, _of_time(run, curve), {"colour": at, **known})

    def add_printed(self, number: int, run: Run) -> None:
        """Add the figures that a run has printed, in their order: nothing says when it was."""
        for name, values in run.found.printed.items():
            curve = Curve()
            for at, value in enumerate(values, 1):
                curve.add(at, value)
            chart = {"title": f"{name}, printed", "unit": "", "x": "number"}
            self._add(chart, run, "", curve.points(), {"colour": number})

    def _add(self, chart: Mapping[str, Any], run: Run, label: str, points: Points, look: Mapping[str, Any]) -> None:
        words = [run.name] if self.several else []
        name = " ".join([*words, *([label] if label else [])]) or chart["title"]
        into = self.by_title.setdefault(chart["title"], {**chart, "curves": []})
        into["curves"].append({"label": name, "points": points, **look})


def _of_time(run: Run, curve: Curve) -> Points:
    """The points of a curve over time, with a gap where the run waited to be started again."""
    began_s = run.curves.began_s
    starts = [round(start.time - began_s, 4) - 0.001 for start in run.found.training.starts[1:]]
    points: Points = [*curve.points(began_s), *((start, None) for start in starts)]
    return sorted(points, key=lambda point: point[0])


def _scaled(points: Points, factor: float) -> Points:
    return [(x, None if y is None else float(f"{y * factor:.6g}")) for x, y in points]
