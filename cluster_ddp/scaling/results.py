"""What a study has found: as words for a terminal, and as the files results.csv, .json, .png and .svg."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.scaling import fit, plot, table
from cluster_ddp.scaling.fit import Fitted
from cluster_ddp.scaling.table import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The table of a study, its models and its recommendation."""

    rows: Sequence[Row]
    """The table."""
    weak: bool
    """Whether, without throughputs, more GPUs do more work."""
    models: Sequence[Fitted | str]
    """Each model; or, in words, why it can't be fitted."""
    recommendation: str
    """Which number of GPUs to ask for, in words."""

    @staticmethod
    def of(
        rows: Sequence[Row], *, weak: bool, same_batch: bool, predict: Sequence[int], min_efficiency: float
    ) -> Results:
        """Fit the models, and recommend a number of GPUs.

        Args:
            rows: the table.
            weak: whether, without throughputs, more GPUs do more work.
            same_batch: whether, with throughputs, the global batch is the same for all.
            predict: numbers of GPUs to predict.
            min_efficiency: the least efficiency of what is recommended.
        """
        strong = not weak and (table.by_time(rows) or same_batch)
        return Results(
            rows=rows,
            weak=weak,
            models=fit.models(table.rates(rows, weak=weak), strong=strong, predict=predict),
            recommendation=table.recommended(rows, min_efficiency=min_efficiency),
        )

    def as_text(self) -> str:
        """Return the table, what the models say, and the recommendation."""
        lines = [table.as_text(self.rows), ""]
        if table.by_time(self.rows):
            work = "more work on more GPUs" if self.weak else "the same work in each; if more GPUs do more: --weak"
            lines.append(f"No throughput was found, so the times of the jobs are compared ({work}).")
        for model in self.models:
            lines += [_sentence(model)] if isinstance(model, str) else self._model_lines(model)
        return "\n".join([*lines, self.recommendation])

    def write(self, path: Path, *, command: str, failures: Mapping[str, str], say: Callable[[str], None]) -> list[Path]:
        """Write the files. Without matplotlib there is no picture.

        Args:
            path: of the files, without a suffix.
            command: that was measured.
            failures: the names of the runs that failed, and how.
            say: is told if there is no picture, and why.
        """
        fitted = [one for one in self.models if isinstance(one, Fitted)]
        record = {
            "command": command,
            "rows": [asdict(row) for row in self.rows],
            "models": [self._model_record(one) for one in fitted],
            "recommendation": self.recommendation,
            "failures": failures,
        }
        written = [path.with_suffix(".csv"), path.with_suffix(".json")]
        written[0].write_text(table.as_csv(self.rows))
        written[1].write_text(json.dumps(record, indent=2) + "\n")
        predicted = [gpus for one in fitted for gpus in one.predictions]
        try:
            return written + plot.draw(path, self.rows, [one.model for one in fitted], predict=predicted)
        except ImportError:
            say(f"No plot: matplotlib is not installed: {plot.EXTRA}")
            return written

    def _model_lines(self, one: Fitted) -> list[str]:
        model = one.model
        is_amdahl = len(model.coefficients) == 2
        serial = f"{100 * model.serial_part:.1f} % of the time on one GPU is serial, " if is_amdahl else ""
        lines = [_sentence(f"{model.name}: {serial}fitted to {', '.join(map(str, model.counts))} GPUs.")]
        for said in self._predictions(one):
            rate = (
                f"a job of {said['seconds']:,.0f} s" if "seconds" in said else f"{said['samples_per_s']:,.0f} samples/s"
            )
            efficiency = f"efficiency {100 * said['efficiency']:.0f} %"
            lines.append(f"  Prediction, not measured: {said['gpus']} GPUs: {rate}, {efficiency}.")
        if one.predictions:
            error = one.held_out_error
            off = "too few numbers of GPUs to check it" if error is None else f"{100 * error:+.1f} %"
            lines.append(f"  Fitted without {model.counts[-1]} GPUs, its error there: {off}.")
        return lines

    def _model_record(self, one: Fitted) -> dict[str, Any]:
        return {
            "name": one.model.name,
            "coefficients": one.model.coefficients,
            "fitted_to": one.model.counts,
            "held_out_gpus": one.model.counts[-1],
            "held_out_error": one.held_out_error,
            "predictions": self._predictions(one),
        }

    def _predictions(self, one: Fitted) -> list[dict[str, Any]]:
        """For each predicted number of GPUs the throughput, or without throughputs the time of a job."""
        found = []
        for gpus, rate in one.predictions.items():
            work = gpus if self.weak else 1
            what = {"seconds": work / rate} if table.by_time(self.rows) else {"samples_per_s": rate}
            found.append({"gpus": gpus, **what, "efficiency": one.efficiency(gpus)})
        return found


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]
