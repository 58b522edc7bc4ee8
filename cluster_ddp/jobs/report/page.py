"""A report as one HTML page that needs no network: summaries, curves, and for an array its tasks, the best first."""

from __future__ import annotations

import bisect
import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp._version import __version__
from cluster_ddp.errors import RunDirError, counted, hours
from cluster_ddp.files import atomic_write
from cluster_ddp.jobs.report import time_series
from cluster_ddp.jobs.report.charts import Run, charts, grid
from cluster_ddp.jobs.report.report_text import notes
from cluster_ddp.jobs.report.summary import Report, bars
from cluster_ddp.jobs.report.training_stats import Start
from cluster_ddp.protocol import File, Then
from cluster_ddp.run_files import read_json

if TYPE_CHECKING:
    from jinja2 import Template

_HTML = Path(__file__).parent / "html"
_FAILURE_WIDTH = 0.4  # per cent of the time line


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
        grid=grid(reports),
        data=_embedded({"charts": charts(runs), "starts": _start_lines(runs)}),
        made=f"cluster-ddp {__version__}, {time.strftime('%Y-%m-%d %H:%M')}",
        points=time_series.POINTS,
        **{name: (_HTML / path).read_text() for name, path in _PARTS.items()},
    )


_PARTS = {
    "script": "report.js",
    "style": "report.css",
    "uplot": "uplot/uPlot.iife.min.js",
    "uplot_css": "uplot/uPlot.min.css",
}


def _run(found: Report, reports: Sequence[Report]) -> Run:
    status, run_dir = found.status, found.status.run_dir or Path()
    same = sum(one.status.name == status.name for one in reports)
    values = " ".join(f"{key}={value}" for key, value in status.values.items())
    name = status.name
    if same > 1:
        name = values if same == len(reports) and values else f"{name} {values or status.job or run_dir.name}"
    try:
        description = read_json(run_dir / File.RUN)
    except (OSError, ValueError):
        description = {}
    return Run(name=name, found=found, curves=time_series.read(run_dir), description=description)


def _summary(run: Run) -> dict[str, Any]:
    """What the template shows of a run."""
    found, path = run.found, (run.found.status.run_dir or Path()).resolve()
    step_s = found.training.step_s or 0.0
    details = ("command", "config", "versions", "topology", "git_commit", "device")
    return {
        "name": run.name,
        "found": found,
        "status": found.status,
        "training": found.training,
        "size": found.size.replace(" x ", " × "),
        "run_dir": path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else found.status.run_dir,
        "bars": [*bars(found), *found.cost.bars],
        "over": lambda node: f" over {hours(node.seconds)}" if len(found.nodes) > found.nodes_at_once else "",
        "notes": notes(found),
        "step_ms": 1000 * step_s,
        "parts": [(name.removesuffix("_s"), 100 * value / step_s) for name, value in found.training.parts.items()],
        "lost": hours(sum(one.lost_s or 0.0 for one in found.training.starts)),
        "timeline": _timeline(run),
        "details": {name.replace("_", " "): _flat(one) for name in details if (one := run.description.get(name))},
    }


def _flat(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(str(key), str(one)) for key, one in value.items() if one is not None]
    return [("", " ".join(map(str, value)) if isinstance(value, list) else str(value))]


def _timeline(run: Run) -> list[dict[str, Any]]:
    """The stretches of time of a run that was started again: training, what was done again, and waiting."""
    starts, times = run.found.training.starts, sorted(run.curves.times)
    if len(starts) < 2 or not times:
        return []
    begin, end = starts[0].time, max(times[-1], starts[-1].time + 1)
    found = []
    for number, start in enumerate(starts):
        after = starts[number + 1] if number + 1 < len(starts) else None
        last = times[max(0, bisect.bisect_left(times, _woke_s(run, start, after)) - 1)] if after else end
        lost_s = min(after.lost_s or 0.0, max(0.0, last - start.time)) if after else 0.0
        stretches = [("training", start.time, max(start.time, last - lost_s)), ("done again", last - lost_s, last)]
        stretches += [("waiting", last, after.time)] if after else []
        for kind, since, until in stretches:
            if until > since:
                share = {"x": 100 * (since - begin) / (end - begin), "width": 100 * (until - since) / (end - begin)}
                found.append({"kind": kind, "title": f"{kind}: {hours(until - since)}", **share})
    for one in run.found.failures:
        x = 100 * (min(max(one.time, begin), end) - begin) / (end - begin)
        found.append({"kind": "failed", "title": one.text, "x": x - _FAILURE_WIDTH / 2, "width": _FAILURE_WIDTH})
    return found


def _woke_s(run: Run, start: Start, after: Start) -> float:
    """When the job of a start began: its nodes are sampled some time before its training starts."""
    woke = [end_s for curve in run.curves.of_nodes.get("cpu", {}).values() for end_s in curve.pauses()]
    return min((end_s for end_s in woke if start.time < end_s <= after.time), default=after.time)


def _start_lines(runs: Sequence[Run]) -> list[float]:
    """When a single run was started again, in seconds since its first record; if it notes no starts, when it failed."""
    if len(runs) > 1:
        return []
    found, began_s = runs[0].found, runs[0].curves.began_s
    failed = [one.time for one in found.failures if one.then == Then.RESTART]
    times = [start.time for start in found.training.starts[1:]] if found.training.starts else failed
    return [round(one - began_s, 1) for one in times]


def _embedded(data: object) -> str:
    """JSON that can stand within <script>."""
    return json.dumps(data, separators=(",", ":"), default=asdict).replace("<", "\\u003c")
