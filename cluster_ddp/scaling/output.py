"""What a study has found: as words for a terminal, and as the files results.csv, .json, .png and .svg."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster_ddp.scaling import speedups
from cluster_ddp.scaling.speedups import Row

_PLOT_EXTRA = "pip install 'cluster_ddp[plot]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The table of a study, and its recommendation."""

    rows: Sequence[Row]
    """The table."""
    weak: bool
    """Whether, without throughputs, more GPUs do more work."""
    recommendation: str
    """Which number of GPUs to ask for, in words."""

    def as_text(self) -> str:
        """Return the table and the recommendation."""
        lines = [speedups.as_text(self.rows), ""]
        if speedups.by_time(self.rows):
            work = "more work on more GPUs" if self.weak else "the same work in each; if more GPUs do more: --weak"
            lines.append(f"No throughput was found, so the times of the jobs are compared ({work}).")
        return "\n".join([*lines, self.recommendation])

    def write(self, path: Path, *, command: str, failures: Mapping[str, str], say: Callable[[str], None]) -> list[Path]:
        """Write the files, by their path without a suffix. Without matplotlib, `say` gets why there is no picture.

        They also have the command that was measured, and how which runs failed.
        """
        record = {
            "command": command,
            "rows": [asdict(row) for row in self.rows],
            "recommendation": self.recommendation,
            "failures": failures,
        }
        written = [path.with_suffix(".csv"), path.with_suffix(".json")]
        written[0].write_text(speedups.as_csv(self.rows))
        written[1].write_text(json.dumps(record, indent=2) + "\n")
        try:
            return written + draw(path, self.rows)
        except ImportError:
            say(f"No plot: matplotlib is not installed: {_PLOT_EXTRA}")
            return written


def draw(path: Path, found: Sequence[Row]) -> list[Path]:
    """Draw speedup over the number of GPUs. Returns the PNG and the SVG; none without two measured configurations.

    Without matplotlib it is an ImportError.
    """
    known = [row for row in found if row.speedup is not None]
    if len(known) < 2:
        return []
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    counts = [row.gpus for row in known]
    axes.plot([counts[0], counts[-1]], [counts[0], counts[-1]], color="0.6", linestyle=":", label="ideal")
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


def _spread(known: Sequence[Row]) -> list[list[float]]:
    """Return how far the slowest and the fastest run are from the median, as speedups."""
    below, above = [], []
    for row in known:
        median = row.samples_per_s or 0.0
        scale = (row.speedup or 0.0) / median if median else 0.0
        below.append((median - (row.samples_per_s_least or 0.0)) * scale)
        above.append(((row.samples_per_s_most or 0.0) - median) * scale)
    return [below, above]
