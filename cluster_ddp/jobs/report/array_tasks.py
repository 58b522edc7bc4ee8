"""The tasks of an array, the best first: a table for a terminal and for the page, a picture; the best one in a line.

The picture is in parallel coordinates (Inselberg 1985).
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster_ddp.errors import RunDirError, aligned, printable
from cluster_ddp.jobs import run_record, run_state
from cluster_ddp.jobs.report import training_stats
from cluster_ddp.jobs.report.summary import Report
from cluster_ddp.jobs.report.training_stats import RESULTS
from cluster_ddp.jobs.status import RunStatus
from cluster_ddp.run.names import Record

_WIDEST = 120  # longer cells, such as an option's value, are cut
# The picture, in pixels.
_WIDTH, _HEIGHT, _TOP, _SIDE, _TEXT = 900.0, 260.0, 34.0, 70.0, 14.0

Results = Mapping[str, Mapping[str, "float | None"]]
"""What a training results in, as `Training.results`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Which of several runs is how good: by accuracy, if any has one, else by loss."""

    by: Literal["accuracy", "loss"] | None
    """What they are compared by; None if no run has either."""
    kinds: Mapping[str, str]
    """The kind of record that each result is taken from: "test", else another, else "train"; the same for all runs."""
    order: Sequence[int]
    """The runs, as places in the order given: the best first, those without a result last."""
    has_best: bool
    """Whether two can be compared."""

    def value(self, run: Results, name: str) -> float | None:
        """Return a result of a run."""
        return run.get(self.kinds[name], {}).get(name)

    def title(self, name: str) -> str:
        """A result with its kind: "test loss"."""
        return f"{self.kinds[name]} {name}".lstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table of an array's tasks; empty cells stand for what is not known."""

    title: str
    """Its heading."""
    cells: Sequence[str]
    """A text for each task."""
    kind: Literal["text", "option", "state", "number"] = "text"
    """What it has; an option is one of the grid, or a figure that the user has named."""


def _ranked(runs: Sequence[Results]) -> Ranking:
    """Compare what trainings result in."""
    kinds = {name: _kind(runs, name) for name in RESULTS}
    values = {name: [one.get(kinds[name], {}).get(name) for one in runs] for name in RESULTS}
    by = next((name for name in ("accuracy", "loss") if any(one is not None for one in values[name])), None)
    compared, sign = values[by] if by else [None] * len(runs), -1 if by == "accuracy" else 1
    order = sorted(range(len(runs)), key=lambda at: (compared[at] is None, sign * (compared[at] or 0.0)))
    has_best = sum(one is not None for one in compared) > 1
    return Ranking(by=by, kinds=kinds, order=order, has_best=has_best)  # type: ignore[arg-type]


def _kind(runs: Sequence[Results], name: str) -> str:
    """The kind of record that says most of a model, of those that have this result."""
    kinds = {kind for one in runs for kind, values in one.items() if name in values}
    kinds -= {Record.TRAIN} if name == "accuracy" else set()
    return min(kinds, key=lambda kind: (kind == Record.TRAIN, kind != Record.TEST, kind), default="")


def _differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the options of the grid that are not the same in all tasks."""
    keys = dict.fromkeys(key for one in values for key in one)
    return [key for key in keys if len({one.get(key) for one in values}) > 1]


def _columns(best_first: Sequence[Report], ranking: Ranking) -> list[Column]:
    """Return the table of an array's tasks. What no task has is left out."""
    tasks, printed = [one.status for one in best_first], [one.printed for one in best_first]
    loss, accuracy = ([ranking.value(one.training.results, name) for one in best_first] for name in RESULTS)
    options, figures = _differing([one.values for one in tasks]), dict.fromkeys(name for one in printed for name in one)
    made = [
        Column(title="task", cells=[one.job or one.name for one in tasks]),
        *(Column(title=key, cells=[one.values.get(key, "") for one in tasks], kind="option") for key in options),
        Column(title="state", cells=[one.state for one in tasks], kind="state"),
        _numbers("epoch", [one.epoch for one in tasks], "{}"),
        _numbers(ranking.title("accuracy"), [None if one is None else 100 * one for one in accuracy], "{:.2f} %"),
        _numbers(ranking.title("loss"), loss, "{:.4g}"),
        *(Column(title=name, cells=[_last(one.get(name, ())) for one in printed], kind="option") for name in figures),
        _numbers("samples/s", [one.samples_per_s for one in tasks], "{:,.0f}"),
        Column(title="elapsed", cells=[one.elapsed or "" for one in tasks], kind="number"),
        Column(title="", cells=["best" if ranking.has_best and at == 0 else "" for at in range(len(tasks))]),
    ]
    return [one for one in made if any(one.cells)]


def _numbers(title: str, values: Iterable[float | None], form: str) -> Column:
    return Column(title=title, cells=["" if one is None else form.format(one) for one in values], kind="number")


def _last(values: Sequence[float]) -> str:
    return f"{values[-1]:.6g}" if values else ""


def as_text(runs: Sequence[Report]) -> str:
    """Return the tasks of an array as one table for a terminal, with what failed."""
    ranking, first = _ranked([one.training.results for one in runs]), runs[0].status
    states = Counter(one.status.state for one in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    lines = [f"{first.name}, array {first.job.partition('_')[0]}: {counts}"]
    folders = [one.status.run_dir for one in runs if one.status.run_dir is not None]
    lines += [f"  Run directories: {folders[0]} … {folders[-1].name}"] if folders else []
    lines += [f"  Size: each {runs[0].size}"] if runs[0].size else []
    lines += ["", *_table(_columns([runs[at] for at in ranking.order], ranking)), ""]
    for status in (one.status for one in runs):
        lines += [f"Task {status.job} failed first: {status.failure}"] if status.failure else []
        lines += [f"Task {status.job}: {status.end}."] if status.end else []
    if ranking.by is None:
        lines.append('Not ranked: no task has logged an accuracy or a loss: world.log("test", accuracy=…)')
    top = runs[ranking.order[0]].status
    lines.append(f"More of one task: cluster-ddp report {shlex.quote(str(top.run_dir or top.job))}")
    return "\n".join(map(printable, lines))


def _table(found: Sequence[Column]) -> list[str]:
    heads = [one.title if one.kind == "option" else one.title.upper() for one in found]
    rows = zip(*([cell or ("-" if one.title else "") for cell in one.cells] for one in found))
    cells = [[printable(cell)[:_WIDEST] for cell in row] for row in (heads, *rows)]
    return ["  ".join(row).rstrip() for row in aligned(cells)]


def best_line(run_dirs: Sequence[Path]) -> str:
    """Return which task of an array is the best, in words; empty if there are not two to compare."""
    with suppress(RunDirError):  # somebody has removed one
        found = [run_record.read(path) for path in run_dirs]
        results = [training_stats.read(path).results for path in run_dirs]
        ranking = _ranked(results)
        if not ranking.has_best or ranking.by is None:
            return ""
        top, keys = found[ranking.order[0]], _differing([one.values for one in found])
        options = ", ".join(f"{key}={top.values[key]}" for key in keys if key in top.values)
        value = ranking.value(results[ranking.order[0]], ranking.by)
        result = f"{ranking.kinds[ranking.by]} {run_state.in_words({ranking.by: value}, ranking.by)[0]}".lstrip()
        whole = shlex.quote(os.path.relpath(top.whole))
        task = f"{top.job} ({options})" if options else top.job
        return printable(f"Best: task {task}: {result}. All tasks: cluster-ddp report {whole}")
    return ""


def grid(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Return the table and the picture of the tasks of arrays, the best first; None without two."""
    runs = [one for one in reports if one.status.values or "_" in one.status.job]
    if len(runs) < 2:
        return None
    ranking = _ranked([one.training.results for one in runs])
    best_first = [runs[at] for at in ranking.order]
    tasks, axes = [one.status for one in best_first], dict[str, Sequence[Any]]()
    if ranking.by is not None:
        axes = {key: [one.values.get(key) for one in tasks] for key in _differing([one.values for one in tasks])}
        factor, unit = (100, ", %") if ranking.by == "accuracy" else (1, "")
        values = (ranking.value(one.training.results, ranking.by) for one in best_first)
        axes[ranking.title(ranking.by) + unit] = [None if one is None else factor * one for one in values]
    return {
        "columns": _columns(best_first, ranking),
        "tasks": len(runs),
        "is_ranked": ranking.by is not None,
        "picture": _picture(axes, tasks) if len(axes) > 1 else None,
    }


def _picture(axes: Mapping[str, Sequence[Any]], tasks: Sequence[RunStatus]) -> dict[str, Any]:
    """The axes with their marks, and a line for each task whose values are all known; the last axis has the results."""
    *_, results = axes.values()
    made, heights = [], []
    for at, (name, values) in enumerate(axes.items()):
        places, x = _places(values), _SIDE + at * (_WIDTH - 2 * _SIDE) / (len(axes) - 1)
        heights.append([None if value is None else places[value] for value in values])
        labels = [(f"{mark:.4g}" if isinstance(mark, float) else str(mark)[:12], y) for mark, y in _apart(places)]
        made.append({"name": name, "x": x, "marks": labels, "last": at == len(axes) - 1})
    lines = []
    for number, (task, result, places_of) in enumerate(zip(tasks, results, zip(*heights))):
        if None not in places_of:
            points = " ".join(f"{axis['x']:.1f},{y:.1f}" for axis, y in zip(made, places_of))
            words = " ".join(f"{key}={value}" for key, value in task.values.items())
            worse = round(number / (len(tasks) - 1), 3)
            lines.append({"points": points, "title": f"{words}: {result:.4g}", "worse": worse})
    return {"axes": made, "lines": lines[::-1], "top": _TOP, "width": _WIDTH, "height": _HEIGHT}  # the best on top


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
