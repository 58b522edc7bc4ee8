"""A picture of a study: speedup over the number of GPUs, with the ideal line and the fitted models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.scaling.fit import Model
from cluster_ddp.scaling.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXTRA = "pip install 'cluster_ddp[plot]'"


def draw(path: Path, found: Sequence[Row], models: Sequence[Model], *, predict: Sequence[int]) -> list[Path]:
    """Draw a study.

    Args:
        path: of the picture, without its suffix.
        found: the table.
        models: each is a line, dashed where it goes beyond what was measured.
        predict: numbers of GPUs up to which the lines go.

    Returns:
        The PNG and the SVG; none without two measured configurations.

    Raises:
        ImportError: there is no matplotlib.
    """
    known = [row for row in found if row.speedup is not None]
    if len(known) < 2:
        return []
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    counts = [row.gpus for row in known]
    last = max([*counts, *predict])
    axes.plot([counts[0], last], [counts[0], last], color="0.6", linestyle=":", label="ideal")
    for model, colour in zip(models, ("tab:orange", "tab:green")):
        _draw_model(axes, model, colour, range(counts[0], last + 1))
    speedups = [row.speedup or 0.0 for row in known]
    axes.errorbar(counts, speedups, yerr=_spread(known), fmt="o", color="tab:blue", capsize=3, label="measured")
    axes.set(xlabel="GPUs", ylabel="speedup", xscale="log", yscale="log", xticks=counts, yticks=counts)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(visible=True, color="0.9")
    axes.legend(frameon=False)
    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for one in paths:
        figure.savefig(one, dpi=150)
    return paths


def _draw_model(axes: Axes, model: Model, colour: str, counts: Sequence[int]) -> None:
    """A line where the model was fitted, a dashed one beyond."""
    of_one = model.samples_per_s(counts[0]) / counts[0]
    beyond = model.counts[-1]
    for dashes, part, words in (
        ("-", [count for count in counts if count <= beyond], ""),
        ("--", [count for count in counts if count >= beyond], ", prediction"),
    ):
        if len(part) > 1:
            speedups = [model.samples_per_s(count) / of_one for count in part]
            axes.plot(part, speedups, dashes, color=colour, linewidth=1, label=model.name + words)


def _spread(known: Sequence[Row]) -> list[list[float]]:
    """How far the slowest and the fastest run are from the median, as speedups."""
    below, above = [], []
    for row in known:
        scale = (row.speedup or 0) / row.samples_per_s if row.samples_per_s else 0.0
        below.append(((row.samples_per_s or 0) - (row.samples_per_s_least or 0)) * scale)
        above.append(((row.samples_per_s_most or 0) - (row.samples_per_s or 0)) * scale)
    return [below, above]
