"""The tasks of an array, sorted by their result, and as a picture in parallel coordinates (Inselberg 1985)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster_ddp.jobs.report.summary import Report
from cluster_ddp.protocol import Record

_WIDTH, _HEIGHT, _TOP, _SIDE, _TEXT = 900.0, 260.0, 34.0, 70.0, 14.0


def grid(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Return the table and the picture of the runs of a grid, the best first; None if there is no grid.

    The result is the accuracy, if any run has one, else the loss: of "test" records, else of another kind, else of
    "train" records, but the same kind for all. A run without it comes last.
    """
    runs = [one for one in reports if one.status.values]
    if len(runs) < 2:
        return None
    keys = list(dict.fromkeys(key for one in runs for key in one.status.values))
    accuracy, loss = (_Result.of(runs, name) for name in ("accuracy", "loss"))
    result = accuracy if any(accuracy.value(one) is not None for one in runs) else loss
    ranked = sorted(runs, key=result.rank)
    columns = [(key, [one.status.values.get(key) for one in ranked]) for key in keys]
    results = [result.value(one) for one in ranked]
    return {
        "keys": keys,
        "rows": [
            {
                "status": one.status,
                "values": [one.status.values.get(key, "") for key in keys],
                "accuracy": accuracy.value(one),
                "loss": loss.value(one),
            }
            for one in ranked
        ],
        "loss": loss.title.capitalize(),
        "width": _WIDTH,
        "height": _HEIGHT,
        **_picture([*columns, (result.title, results)], ranked),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """What tasks are ranked by."""

    name: str
    kind: str

    @staticmethod
    def of(runs: Sequence[Report], name: str) -> _Result:
        """A result of the kind of record that says most of a model."""
        kinds = {kind for one in runs for kind, values in one.training.results.items() if name in values}
        kinds -= {Record.TRAIN} if name == "accuracy" else set()
        best = min(kinds, key=lambda kind: (kind == Record.TRAIN, kind != Record.TEST, kind), default="")
        return _Result(name=name, kind=best)

    @property
    def title(self) -> str:
        return "accuracy, %" if self.name == "accuracy" else f"{self.kind} loss".lstrip()

    def value(self, one: Report) -> float | None:
        found = one.training.results.get(self.kind, {}).get(self.name)
        return found if found is None or self.name == "loss" else 100 * found

    def rank(self, one: Report) -> tuple[bool, float]:
        value = self.value(one)
        return (value is None, 0.0 if value is None else value if self.name == "loss" else -value)


def _picture(columns: Sequence[tuple[str, Sequence[Any]]], ranked: Sequence[Report]) -> dict[str, Any]:
    """The axes with their marks, and a line for each run whose values are all known."""
    gap = (_WIDTH - 2 * _SIDE) / max(1, len(columns) - 1)
    axes, heights = [], []
    for at, (name, values) in enumerate(columns):
        places = _places(values)
        heights.append([None if value is None else places[value] for value in values])
        labels = [(f"{mark:.4g}" if isinstance(mark, float) else str(mark)[:12], y) for mark, y in _apart(places)]
        axes.append({"name": name, "x": _SIDE + at * gap, "marks": labels, "last": at == len(columns) - 1})
    lines = []
    for number, one in enumerate(ranked):
        places_of = [of_axis[number] for of_axis in heights]
        if None not in places_of:
            points = " ".join(f"{axis['x']:.1f},{y:.1f}" for axis, y in zip(axes, places_of))
            words = " ".join(f"{key}={value}" for key, value in one.status.values.items())
            share = number / max(1, len(ranked) - 1)
            lines.append(
                {"points": points, "title": f"{words}: {columns[-1][1][number]:.4g}", "worse": round(share, 3)}
            )
    return {"axes": axes, "lines": lines[::-1], "top": _TOP}  # the best on top


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
