"""The tasks of an array, the best first: as one table for a terminal and for the page; and the best one in a line."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.errors import RunDirError, aligned, printable
from cluster_ddp.jobs import run_info, run_record
from cluster_ddp.jobs.report import training_stats
from cluster_ddp.jobs.report.summary import Report
from cluster_ddp.jobs.report.training_stats import RESULTS
from cluster_ddp.protocol import Record

_WIDEST = 120  # longer cells, such as an option's value, are cut

Results = Mapping[str, Mapping[str, "float | None"]]
"""What a training results in, as `Training.results`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Which of several runs is how good: by accuracy, if any has one, else by loss."""

    by: Literal["accuracy", "loss"] | None
    """What they are compared by; None if no run has either."""
    kinds: Mapping[str, str]
    """The kind of record that each result is taken from: "test", else another, else "train"; the same for all runs."""
    values: Mapping[str, Sequence[float | None]]
    """Of each result, those of the runs, in the order given."""
    order: Sequence[int]
    """The runs, as places in the order given: the best first, those without a result last."""

    @property
    def best(self) -> int | None:
        """Which run is the best; None unless two can be compared."""
        known = [] if self.by is None else [value for value in self.values[self.by] if value is not None]
        return self.order[0] if len(known) > 1 else None

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


def ranked(runs: Sequence[Results]) -> Ranking:
    """Compare what trainings result in."""
    kinds = {name: _kind(runs, name) for name in RESULTS}
    values = {name: [one.get(kinds[name], {}).get(name) for one in runs] for name in RESULTS}
    by = next((name for name in ("accuracy", "loss") if any(one is not None for one in values[name])), None)
    compared, sign = values[by] if by else [None] * len(runs), -1 if by == "accuracy" else 1
    order = sorted(range(len(runs)), key=lambda at: (compared[at] is None, sign * (compared[at] or 0.0)))
    return Ranking(by=by, kinds=kinds, values=values, order=order)  # type: ignore[arg-type]


def _kind(runs: Sequence[Results], name: str) -> str:
    """The kind of record that says most of a model, of those that have this result."""
    kinds = {kind for one in runs for kind, values in one.items() if name in values}
    kinds -= {Record.TRAIN} if name == "accuracy" else set()
    return min(kinds, key=lambda kind: (kind == Record.TRAIN, kind != Record.TEST, kind), default="")


def differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the options of the grid that are not the same in all tasks."""
    keys = dict.fromkeys(key for one in values for key in one)
    return [key for key in keys if len({one.get(key) for one in values}) > 1]


def columns(runs: Sequence[Report], ranking: Ranking) -> list[Column]:
    """Return the table of an array's tasks, in the order of the ranking. What no task has is left out."""
    tasks, figures = [one.status for one in runs], dict.fromkeys(name for one in runs for name in one.printed)
    accuracy, loss = ranking.values["accuracy"], ranking.values["loss"]
    epochs, speeds = [one.epoch for one in tasks], [one.samples_per_s for one in tasks]
    made = [
        Column(title="task", cells=[one.job or one.name for one in tasks]),
        *(_option(key, [one.values.get(key, "") for one in tasks]) for key in differing([one.values for one in tasks])),
        Column(title="state", cells=[one.state for one in tasks], kind="state"),
        _numbers("epoch", epochs, "{}"),
        _numbers(ranking.title("accuracy"), [None if one is None else 100 * one for one in accuracy], "{:.2f} %"),
        _numbers(ranking.title("loss"), loss, "{:.4g}"),
        *(_option(name, [_last(one.printed.get(name, ())) for one in runs]) for name in figures),
        _numbers("samples/s", speeds, "{:,.0f}"),
        Column(title="elapsed", cells=[one.elapsed or "" for one in tasks], kind="number"),
        Column(title="", cells=["best" if at == ranking.best else "" for at in range(len(runs))]),
    ]
    return [
        Column(title=one.title, cells=[one.cells[at] for at in ranking.order], kind=one.kind)
        for one in made
        if any(one.cells)
    ]


def _option(title: str, cells: Sequence[str]) -> Column:
    return Column(title=title, cells=cells, kind="option")


def _numbers(title: str, values: Iterable[float | None], form: str) -> Column:
    return Column(title=title, cells=["" if one is None else form.format(one) for one in values], kind="number")


def _last(values: Sequence[float]) -> str:
    return f"{values[-1]:.6g}" if values else ""


def as_text(runs: Sequence[Report]) -> str:
    """Return the tasks of an array as one table for a terminal, with what failed."""
    ranking, first = ranked([one.training.results for one in runs]), runs[0].status
    states = Counter(one.status.state for one in runs)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    lines = [f"{first.name}, array {first.job.partition('_')[0]}: {counts}"]
    folders = [one.status.run_dir for one in runs if one.status.run_dir is not None]
    lines += [f"  Run directories: {folders[0]} … {folders[-1].name}"] if folders else []
    lines += [f"  Size: each {runs[0].size}"] if runs[0].size else []
    lines += ["", *_table(columns(runs, ranking)), ""]
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
        ranking = ranked([training_stats.read(path).results for path in run_dirs])
        if ranking.best is None or ranking.by is None:
            return ""
        top, keys = found[ranking.best], differing([one.values for one in found])
        options = ", ".join(f"{key}={top.values[key]}" for key in keys if key in top.values)
        value = ranking.values[ranking.by][ranking.best]
        result = f"{ranking.kinds[ranking.by]} {run_info.in_words({ranking.by: value}, ranking.by)[0]}".lstrip()
        whole = shlex.quote(os.path.relpath(top.run_dir.with_name(top.whole_name)))
        task = f"{top.job} ({options})" if options else top.job
        return printable(f"Best: task {task}: {result}. All tasks: cluster-ddp report {whole}")
    return ""
