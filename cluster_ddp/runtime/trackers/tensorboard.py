"""TensorBoard: one file of events for each start of a job. Show it with `tensorboard --logdir runs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster_ddp.runtime.trackers.tracker import Point, Run


class TensorBoard:
    """A `Tracker` that writes files of events."""

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

    def log(self, points: Sequence[Point]) -> None:
        """Write points."""
        for point in points:
            for tag, value in point.values.items():
                self._writer.add_scalar(tag, value, point.step, walltime=point.time_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
