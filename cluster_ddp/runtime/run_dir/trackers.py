"""What a tracker does, and the three: TensorBoard, Weights & Biases, MLflow.

It takes the records of metrics.jsonl, and hands their numbers to a library, which it imports when a run begins.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster_ddp.run.names import GLOBAL_STEP, OF_FIRST_RECORD

_WANDB_RUNS = "offline-run-*"
_MOST = 1000  # metrics that MLflow takes at once
_MOST_PARAMS = 100
_MOST_NAME = 120  # bytes of each of its two parts: MLflow takes 250 characters, a file system 255 bytes
_MOST_TEXT = 6000  # characters of a param


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The run that is tracked."""

    name: str
    """Name of the run directory."""
    project: str
    """What the run is one of: the job's name."""
    folder: Path
    """The tracker's own folder, absolute. It exists."""
    id: str
    """The run's id, the same in each start; letters and digits."""
    config: Mapping[str, Any]
    """Configuration, command and versions, by name; the values are numbers or text."""


class Tracker(Protocol):
    """Hands the numbers of records to a library. All methods are called in one thread, and may raise anything."""

    upload: str
    """After `begin`: the command that uploads the run from a machine with a network; empty if nothing is to upload."""

    def begin(self, run: Run) -> None:
        """Begin the run, or begin it anew: what the folder has of an earlier start goes. Imports the library."""

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Take points, in the order of their records, and write them out."""

    def close(self) -> None:
        """Write what is left, and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricPoint:
    """The numbers of a record."""

    step: int
    """Steps since the training began. Without a `Checkpointer`, how many records there were before."""
    time_s: float
    """When it was logged, in seconds of UNIX time."""
    values: Mapping[str, float]
    """Each number by its tag, such as train/loss."""

    @staticmethod
    def of(record: Mapping[str, Any], number: int) -> MetricPoint:
        """Return the numbers of a record of metrics.jsonl. `number` is how many records were before it."""
        step, time_s, kind = record.get(GLOBAL_STEP), record.get("time"), record.get("kind")
        own = ("time", GLOBAL_STEP, *OF_FIRST_RECORD)
        numbers = {name: value for name, value in record.items() if type(value) in (int, float) and name not in own}
        return MetricPoint(
            step=step if isinstance(step, int) else number,
            time_s=float(time_s) if isinstance(time_s, (int, float)) else 0.0,
            values={f"{kind}/{name}": float(value) for name, value in numbers.items()},
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield the values of nested dictionaries by names such as topology/rank. Lists become text, None is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, (str, int, float)):
            yield prefix + name, value
        elif value is not None:
            yield prefix + name, str(value)


class TensorBoard:
    """A `Tracker` that writes a file of events for each start of a job. Show it with `tensorboard --logdir runs`."""

    upload = ""

    def begin(self, run: Run) -> None:
        """Replace the files of earlier starts.

        They can't be continued behind the checkpoint: a record that stays and one that was lost may have the same step.
        A TensorBoard that has read the old files drops what it knows, by `purge_step`.
        """
        from torch.utils.tensorboard import SummaryWriter

        for old in run.folder.glob("events.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(run.folder), purge_step=0)
        config = json.dumps(dict(run.config), indent=2)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in config.splitlines()))

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Write points."""
        for point in points:
            for tag, value in point.values.items():
                self._writer.add_scalar(tag, value, point.step, walltime=point.time_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A `Tracker` that writes an offline run, which `wandb sync` uploads from a machine with a network."""

    def begin(self, run: Run) -> None:
        """Replace the offline runs of earlier starts: there is one folder at most to upload, with the same id.

        W&B gets neither code nor output nor figures of the machine: the folder is small, and has no secret.
        """
        import wandb

        self.upload = f"wandb sync {shlex.quote(str(run.folder / 'wandb'))}/{_WANDB_RUNS}"
        for old in (run.folder / "wandb").glob(_WANDB_RUNS):
            shutil.rmtree(old)
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self._run: Any = wandb.init(
            mode="offline",
            project=run.project,
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            settings=settings,
        )
        # Its own step counts what is logged. With ours as its step it would take one record a step, and drop others.
        self._run.define_metric("*", step_metric=GLOBAL_STEP)

    def log(self, points: Sequence[MetricPoint]) -> None:
        """Write points."""
        for point in points:
            self._run.log({**point.values, GLOBAL_STEP: point.step, "_timestamp": point.time_s})

    def close(self) -> None:
        """End the offline run, and the process that writes it."""
        self._run.finish()


class MLflow:
    """A `Tracker` that writes a store of files: an experiment with one run. MLflow's commands hand it to a server."""

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

    def log(self, points: Sequence[MetricPoint]) -> None:
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
    `known` has the names of the tags before; the new one is added.
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


BACKENDS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""By their names for `submit --track`."""
