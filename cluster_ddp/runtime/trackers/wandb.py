"""Weights & Biases, offline: a folder that `wandb sync` uploads from a machine with a network."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from typing import Any

from cluster_ddp.protocol import GLOBAL_STEP
from cluster_ddp.runtime.trackers.tracker import Point, Run

FOLDERS = "offline-run-*"


class WandB:
    """A `Tracker` that writes an offline run of Weights & Biases."""

    def begin(self, run: Run) -> None:
        """Replace the offline runs of earlier starts: there is one folder at most to upload, with the same id.

        W&B gets neither code nor output nor figures of the machine: the folder is small, and has no secret.
        """
        import wandb

        self.upload = f"wandb sync {shlex.quote(str(run.folder / 'wandb'))}/{FOLDERS}"
        for old in (run.folder / "wandb").glob(FOLDERS):
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

    def log(self, points: Sequence[Point]) -> None:
        """Write points."""
        for point in points:
            self._run.log({**point.values, GLOBAL_STEP: point.step, "_timestamp": point.time_s})

    def close(self) -> None:
        """End the offline run, and the process that writes it."""
        self._run.finish()
