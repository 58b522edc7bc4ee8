"""A report as one HTML page that needs no network: summaries, curves, and for an array its tasks, the best first."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster_ddp._version import __version__
from cluster_ddp.errors import RunDirError, counted, hours
from cluster_ddp.jobs.report import array_tasks, time_series
from cluster_ddp.jobs.report.report_text import notes
from cluster_ddp.jobs.report.summary import Report, bars
from cluster_ddp.jobs.report.time_series import Curve, Curves
from cluster_ddp.run.files import atomic_write, read_json
from cluster_ddp.run.names import File, Then

if TYPE_CHECKING:
    from jinja2 import Template

_HTML = Path(__file__).parent / "html"
_PARTS = {
    "script": "report.js",
    "style": "report.css",
    "uplot": "uplot/uPlot.iife.min.js",
    "uplot_css": "uplot/uPlot.min.css",
}
_DETAILS = ("command", "config", "versions", "topology", "git_commit", "device")  # of run.json
# Kinds of records whose loss and accuracy share a chart, with a colour each: of the training, and of evaluations.
_KINDS = ("train", "test", "val", "valid", "validation", "eval")
_SHARED = {"loss": ("Loss", ""), "accuracy": ("Accuracy", "%")}
_LOGGED = {
    **{f"{kind} {name}": chart for name, chart in _SHARED.items() for kind in _KINDS},
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
_MOST_OTHERS = 12  # further charts, of what a training logs besides

_Points = list[tuple[float, "float | None"]]
_Drawn = tuple[dict[str, Any], str, dict[str, Any]]
"""A chart without its curves; a label for one of them; that curve."""


class _Run(NamedTuple):
    """A run: its name on the page, its report, and its figures over time."""

    name: str
    found: Report
    curves: Curves


def write(path: Path, reports: Sequence[Report]) -> None:
    """Write the page of one or several runs.

    Raises:
        RunDirError: the file can't be written.
    """
    try:
        with atomic_write(path, shared=True) as file:
            file.write(page(reports).encode(errors="replace"))
    except OSError as error:
        hint = "choose a file in a folder that you may write to: --html report.html"
        raise RunDirError(f"Writing {path}:", f"{error.strerror}.", hint) from error


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(_HTML)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html.j2")


def page(reports: Sequence[Report]) -> str:
    """Return the page of one or several runs."""
    runs = [_run(one, reports) for one in reports]
    return _template().render(
        title=runs[0].name if len(runs) == 1 else counted(len(runs), "run"),
        runs=[_summary(run) for run in runs],
        grid=array_tasks.grid(reports),
        data=_embedded({"charts": _charts(runs), "starts": _start_lines(runs)}),
        made=f"cluster-ddp {__version__}, {time.strftime('%Y-%m-%d %H:%M')}",
        points=time_series.POINTS,
        **{name: (_HTML / path).read_text() for name, path in _PARTS.items()},
    )


def _run(found: Report, reports: Sequence[Report]) -> _Run:
    status, run_dir = found.status, found.status.run_dir
    same = sum(one.status.name == status.name for one in reports)
    values = " ".join(f"{key}={value}" for key, value in status.values.items())
    name = status.name
    if same > 1:
        of_this = values or status.job or (run_dir.name if run_dir is not None else "")
        name = values if same == len(reports) and values else f"{name} {of_this}"
    curves = time_series.read(run_dir) if run_dir is not None else time_series.Curves()
    return _Run(name, found, curves)


def _summary(run: _Run) -> dict[str, Any]:
    """What the template shows of a run."""
    found, run_dir, here = run.found, run.found.status.run_dir, Path.cwd()
    step_s, description = found.training.step_s or 0.0, dict[str, Any]()
    if run_dir is not None:
        with suppress(OSError, ValueError):
            description = read_json(run_dir / File.RUN)
        run_dir = path.relative_to(here) if (path := run_dir.resolve()).is_relative_to(here) else run_dir
    return {
        "name": run.name,
        "found": found,
        "size": found.size.replace(" x ", " × "),
        "run_dir": run_dir,
        "bars": [*bars(found), *found.cost.bars],
        "over": lambda node: f" over {hours(node.seconds)}" if len(found.nodes) > found.nodes_at_once else "",
        "notes": notes(found),
        "step_ms": 1000 * step_s,
        "parts": [(name.removesuffix("_s"), 100 * value / step_s) for name, value in found.training.parts.items()],
        "lost": hours(sum(one.lost_s or 0.0 for one in found.training.starts)),
        "timeline": time_series.timeline(run.curves, found.training.starts, found.failures),
        "details": {name.replace("_", " "): _flat(one) for name in _DETAILS if (one := description.get(name))},
    }


def _flat(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(str(key), str(one)) for key, one in value.items() if one is not None]
    return [("", " ".join(map(str, value)) if isinstance(value, list) else str(value))]


def _start_lines(runs: Sequence[_Run]) -> list[float]:
    """When a single run was started again, in seconds since its first record; if it notes no starts, when it failed."""
    if len(runs) > 1:
        return []
    found, began_s = runs[0].found, runs[0].curves.began_s
    failed = [one.time for one in found.failures if one.then == Then.RESTART]
    times = [start.time for start in found.training.starts[1:]] if found.training.starts else failed
    return [round(one - began_s, 1) for one in times]


def _charts(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Return the charts that have a curve, as the page's script takes them; each of several runs has its own colour."""
    several = len(runs) > 1
    kinds = {run.curves.over for run in runs if run.curves.logged}
    over = next((over for over in ("time", "step", "epoch") if over in kinds), "time")
    made: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        logged = _logged(run, together=several) if run.curves.over == over else ()
        for chart, label, curve in (*logged, *_steps(run), *_nodes(run, together=several), *_printed(run)):
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


def _logged(run: _Run, *, together: bool) -> Iterator[_Drawn]:
    """What the training has logged; `together` with other runs, its curves have one colour."""
    begin = run.curves.began_s if run.curves.over == "time" else 0.0
    kinds = [kind for kind in _KINDS if any(name.startswith(f"{kind} ") for name in run.curves.logged)]
    for name in sorted(run.curves.logged, key=lambda name: (name not in _LOGGED, name)):
        if name in _STEPS_SAY_IT_BETTER and run.curves.by_time:
            continue
        title, unit = _LOGGED.get(name, (name, ""))
        points = _scaled(run.curves.logged[name].points(begin), 100 if unit == "%" else 1)
        kind, _, figure = name.partition(" ")
        is_shared = kind in kinds and figure in _SHARED
        several = sum(f"{one} {figure}" in run.curves.logged for one in kinds) > 1
        chart = {"title": title, "unit": unit, "x": run.curves.over}
        curve = {"points": points, "dashed": is_shared and kind != "train"}
        if not together and is_shared:
            curve["colour"] = kinds.index(kind)
        yield chart, kind if is_shared and (several or title == "Loss") else "", curve


def _steps(run: _Run) -> Iterator[_Drawn]:
    """The times of the steps."""
    for name, (title, unit, factor, label, dashed) in _OF_STEPS.items():
        if name in run.curves.by_time:
            points = _scaled(_of_time(run, run.curves.by_time[name]), factor)
            yield {"title": title, "unit": unit, "x": "time"}, label, {"points": points, "dashed": dashed}


def _nodes(run: _Run, *, together: bool) -> Iterator[_Drawn]:
    """How the nodes were used: the mean over them, or each of them in a colour of its own."""
    for name, chart in _OF_NODES.items():
        curves = run.curves.of_nodes.get(name, {})
        if together:
            yield chart, "", {"points": _of_time(run, time_series.mean(curves.values()))}
            continue
        for at, (node, curve) in enumerate(curves.items()):
            edges = {edge: run.curves.of_nodes.get(f"{name} {edge}", {}).get(node) for edge in ("least", "most")}
            known = {edge: _of_time(run, one) for edge, one in edges.items() if one is not None}
            yield chart, node, {"points": _of_time(run, curve), "colour": at, **known}


def _printed(run: _Run) -> Iterator[_Drawn]:
    """The figures that it has printed, in their order: nothing says when it was."""
    for name, values in run.found.printed.items():
        curve = Curve()
        for at, value in enumerate(values, 1):
            curve.add(at, value)
        yield {"title": f"{name}, printed", "unit": "", "x": "number"}, "", {"points": curve.points()}


def _of_time(run: _Run, curve: Curve) -> _Points:
    """The points of a curve over time, with a gap where the run waited to be started again."""
    began_s = run.curves.began_s
    starts = [round(start.time - began_s, 4) - 0.001 for start in run.found.training.starts[1:]]
    points: _Points = [*curve.points(began_s), *((start, None) for start in starts)]
    return sorted(points, key=lambda point: point[0])


def _scaled(points: _Points, factor: float) -> _Points:
    return [(x, None if y is None else float(f"{y * factor:.6g}")) for x, y in points]


def _embedded(data: object) -> str:
    """JSON that can stand within <script>."""
    return json.dumps(data, separators=(",", ":"), default=asdict).replace("<", "\\u003c")
