"""How far this rank is, and when it last progressed: by a completed step, collective of `World`, or batch.

Until the first step nothing counts: imports, downloads and compiling may take long.
"""

from __future__ import annotations

import time
from pathlib import Path

from cluster_ddp import processes

last_s = 0.0
"""Time of the last progress, on the clock of time.monotonic(); 0 before the first step."""
run_dir: Path | None = None
"""The run directory, once the training has one."""
steps: int | None = None
"""Number of steps since the beginning of the training, which a `Checkpointer` counts; None without one."""
micro_batch: int | None = None
"""Number of samples in the batch of `World.accumulate`'s body, if its update may have smaller ones; None else."""
_suspensions = processes.Suspensions()


def begin_run(path: Path) -> None:
    """Note the run directory of a training, whose steps nobody counts yet."""
    global run_dir, steps
    run_dir, steps = path, None


def note_steps(count: int) -> None:
    """Note the number of steps since the beginning of the training."""
    global steps
    steps = count


def note_micro_batch(samples: int | None) -> None:
    """Note the number of samples in the batch that is computed; None if its update can't have smaller ones."""
    global micro_batch
    micro_batch = samples


def note_step() -> None:
    """Note that a step is done. From the first one on, the hang watch is awake."""
    global last_s
    last_s = time.monotonic()


def note_progress() -> None:
    """Note that a collective has ended or a batch has come. Before the first step it has no effect."""
    global last_s
    if last_s:
        last_s = time.monotonic()


def note_suspension(pause_s: float) -> bool:
    """Return whether this process was suspended: all ranks were, and begin to wait anew. Call it every `pause_s`."""
    was_suspended = bool(_suspensions.missed_s(pause_s))
    if was_suspended:
        note_progress()
    return was_suspended


def reset() -> None:
    """Forget the steps of a world before."""
    global last_s, run_dir, steps, micro_batch
    last_s, run_dir, steps, micro_batch = 0.0, None, None, None
