"""What a study has found: as words for a terminal, and as the files results.csv, .json, .png and .svg."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.scaling import speedups
from cluster_ddp.scaling.fit import Model
from cluster_ddp.scaling.speedups import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLOT_EXTRA = "pip install 'cluster_ddp[plot]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The table of a study, its models and its recommendation."""

    rows: Sequence[Row]
    """The table."""
    weak: bool
    """Whether, without throughputs, more GPUs do more work."""
    models: Sequence[Model | str]
    """Each model; or, in words, why it can't be fitted."""
    predict: Sequence[int]
    """Numbers of GPUs to predict."""
    recommendation: str
    """Which number of GPUs to ask for, in words."""

    def as_text(self) -> str:
        """Return the table, what the models say, and the recommendation."""
        lines = [speedups.as_text(self.rows), ""]
        if speedups.by_time(self.rows):
            work = "more work on more GPUs" if self.weak else "the same work in each; if more GPUs do more: --weak"
            lines.append(f"No throughput was found, so the times of the jobs are compared ({work}).")
        for model in self.models:
            said = [model] if isinstance(model, str) else self._lines_of(model)
            lines += [said[0][0].upper() + said[0][1:], *said[1:]]
        return "\n".join([*lines, self.recommendation])

    def write(self, path: Path, *, command: str, failures: Mapping[str, str], say: Callable[[str], None]) -> list[Path]:
        """Write the files, by their path without a suffix. Without matplotlib, `say` gets why there is no picture.

        They also have the command that was measured, and how which runs failed.
        """
        fitted = [one for one in self.models if isinstance(one, Model)]
        record = {
            "command": command,
            "rows": [asdict(row) for row in self.rows],
            "models": [self._record_of(one) for one in fitted],
            "recommendation": self.recommendation,
            "failures": failures,
        }
        written = [path.with_suffix(".csv"), path.with_suffix(".json")]
        written[0].write_text(speedups.as_csv(self.rows))
        written[1].write_text(json.dumps(record, indent=2) + "\n")
        try:
            return written + draw(path, self.rows, fitted, predict=self.predict if fitted else ())
        except ImportError:
            say(f"No plot: matplotlib is not installed: {_PLOT_EXTRA}")
            return written

    def _lines_of(self, model: Model) -> list[str]:
        is_amdahl = len(model.coefficients) == 2
        serial = f"{100 * model.serial_part:.1f} % of the time on one GPU is serial, " if is_amdahl else ""
        lines = [f"{model.name}: {serial}fitted to {', '.join(map(str, model.counts))} GPUs."]
        for said in self._predictions(model):
            rate = (
                f"a job of {said['seconds']:,.0f} s" if "seconds" in said else f"{said['samples_per_s']:,.0f} samples/s"
            )
            efficiency = f"efficiency {100 * said['efficiency']:.0f} %"
            lines.append(f"  Prediction, not measured: {said['gpus']} GPUs: {rate}, {efficiency}.")
        if self.predict:
            error = model.held_out_error
            if error is None:
                lines.append("  Not checked: that needs one more number of GPUs, left out of the fit.")
            else:
                lines.append(f"  Fitted without {model.counts[-1]} GPUs, it is off by {100 * error:+.1f} % there.")
        return lines

    def _record_of(self, model: Model) -> dict[str, Any]:
        return {
            "name": model.name,
            "coefficients": model.coefficients,
            "fitted_to": model.counts,
            "held_out_gpus": model.counts[-1],
            "held_out_error": model.held_out_error,
            "predictions": self._predictions(model),
        }

    def _predictions(self, model: Model) -> list[dict[str, Any]]:
        """Return for each predicted number of GPUs the throughput, or without throughputs the time of a job."""
        found = []
        for gpus in self.predict:
            rate = model.samples_per_s(gpus)
            work = gpus if self.weak else 1
            what = {"seconds": work / rate} if speedups.by_time(self.rows) else {"samples_per_s": rate}
            found.append({"gpus": gpus, **what, "efficiency": model.efficiency(gpus)})
        return found


def draw(path: Path, found: Sequence[Row], models: Sequence[Model], *, predict: Sequence[int]) -> list[Path]:
    """Draw speedup over the number of GPUs. Returns the PNG and the SVG; none without two measured configurations.

    Each model is a line up to the numbers of GPUs in `predict`, dashed where it goes beyond what was measured. Without
    matplotlib it is an ImportError.
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
    """Draw a line where the model was fitted, a dashed one beyond."""
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
    """Return how far the slowest and the fastest run are from the median, as speedups."""
    below, above = [], []
    for row in known:
        median = row.samples_per_s or 0.0
        scale = (row.speedup or 0.0) / median if median else 0.0
        below.append((median - (row.samples_per_s_least or 0.0)) * scale)
        above.append(((row.samples_per_s_most or 0.0) - median) * scale)
    return [below, above]
