"""The reports of benchmarks (see `record`) as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BEGIN = "<!-- made by bench.py: from here -->"
END = "<!-- made by bench.py: to here -->"
_HEAD = ("figure", "value", "from … to", "runs", "against", "ratio", "target", "met", "limit")


def replaced(document: str, text: str) -> str:
    """A document with another text between its two markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def section(title: str, about: str, result: Mapping[str, Any]) -> str:
    """A benchmark's heading, its description, and its table, or why there is none."""
    parts = [f"## {title}", about, _caption(result)]
    if "figures" in result:
        parts.append(table(_HEAD, [_cells(figure) for figure in result["figures"]]))
    if result.get("left_out"):
        parts.append(f"Left out: {'; '.join(result['left_out'])}.")
    return "\n\n".join(parts)


def _caption(result: Mapping[str, Any]) -> str:
    told = [f"`{result['command']}`", *(result[key] for key in ("hardware", "versions", "date") if key in result)]
    if "others_percent" in result:
        told.append(f"others used {result['others_percent']:.0f} % of the CPUs meanwhile")
    reasons = {"Not measured": result.get("unable"), "Failed": result.get("failed")}
    return ". ".join([*(f"{word}: {why}" for word, why in reasons.items() if why), "; ".join(told)]) + "."


def _cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = figure["spread"]
    return (
        figure["what"],
        f"{_number(figure['median'])} {figure['unit']}",
        f"{_number(low)} … {_number(high)}" if figure["runs"] > 1 else "",
        str(figure["runs"]),
        figure["peer"],
        _ratio(figure["ratios"], figure["ratio"]),
        _target(figure),
        {True: "yes", False: "**no**", None: ""}[figure["met"]],
        figure["limit"],
    )


def _ratio(ratios: list[float], median: float | None) -> str:
    if median is None:
        return ""
    spread = f" ({_number(min(ratios))} … {_number(max(ratios))})" if len(ratios) > 1 else ""
    return f"{_number(median)}{spread}"


def _target(figure: Mapping[str, Any]) -> str:
    """The target, with its unit: for the ratio if there is one, else for the value."""
    unit = " ×" if figure["ratios"] else f" {figure['unit']}"
    bounds = (("at least", figure["at_least"]), ("at most", figure["at_most"]))
    return ", ".join(f"{words} {_number(bound)}{unit}" for words, bound in bounds if bound is not None)


def _number(value: float) -> str:
    """A number with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
