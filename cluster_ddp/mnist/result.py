"""What a training returns. Imports no torch: `Job.result` loads it where the job was submitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The last figures of a training. A figure that this start of the job did not measure is None."""

    accuracy: float | None = None
    """On the test set, after the last epoch: 0 to 1."""
    loss: float | None = None
    """Mean over the test set, after the last epoch."""
    samples_per_s: float | None = None
    """Training samples per second over all ranks, from the last log line."""
    run_dir: Path
    """The run directory."""
