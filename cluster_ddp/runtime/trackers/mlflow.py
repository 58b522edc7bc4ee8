"""MLflow, into a store of files. Show it, or hand it over to a server, with MLflow's own commands."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.runtime.trackers.tracker import Point, Run

_MOST = 1000  # metrics that MLflow takes at once
_MOST_PARAMS = 100
_MOST_NAME = 120  # bytes of each of its two parts: MLflow takes 250 characters, a file system 255 bytes
_MOST_TEXT = 6000  # characters of a param


class MLflow:
    """A `Tracker` that writes a store of files: an experiment with one run."""

    upload = ""

    def begin(self, run: Run) -> None:
        """Find the run of earlier starts, and take its metrics and params away; or make a run.

        MLflow has no call to remove a metric, so their files are removed.
        """
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.17 refuses it else
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=run.folder.as_uri())
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([number], f"tags.cluster_ddp = '{run.id}'")
        made = found[0] if found else self._client.create_run(number, run_name=run.name, tags={"cluster_ddp": run.id})
        self._id = made.info.run_id
        for name in ("metrics", "params"):
            _empty(run.folder / number / self._id / name)
        self._client.update_run(self._id, status="RUNNING")
        self._names: dict[str, str] = {}
        of_params: dict[str, str] = {}
        params = [
            mlflow.entities.Param(_named(name, of_params), str(value)[:_MOST_TEXT])
            for name, value in run.config.items()
        ]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _MOST_PARAMS])

    def log(self, points: Sequence[Point]) -> None:
        """Write points."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_named(tag, self._names), value, math.floor(point.time_s * 1000), point.step)
            for point in points
            for tag, value in point.values.items()
        ]
        for at in range(0, len(metrics), _MOST):
            self._client.log_batch(self._id, metrics=metrics[at : at + _MOST])

    def close(self) -> None:
        """Mark the run as finished. A start that follows it makes it running again."""
        self._client.set_terminated(self._id)


def _named(tag: str, known: dict[str, str]) -> str:
    """The name that MLflow takes for a tag, its own for each: letters, digits, "_", "-", "." and blanks after one "/".

    MLflow refuses others (validation.py), and makes a file for each name, so no name may continue another one's path.

    Args:
        tag: such as train/loss.
        known: the names of the tags before; the new one is added.
    """
    if tag not in known:
        parts = [re.sub(r"[^\w.\- ]", "_", part.replace("/", ".")) for part in tag.split("/", 1)]
        short = [part.encode()[:_MOST_NAME].decode(errors="ignore") for part in parts]
        name = "/".join(part if part.strip(".") else "_" for part in short)
        while name in known.values():
            name += "_"
        known[tag] = name
    return known[tag]


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
