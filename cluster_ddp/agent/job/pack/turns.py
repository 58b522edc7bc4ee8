"""The starts of a packed task, in its run directory: packed.json. Its job writes it, `status` reads it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.agent import outcome
from cluster_ddp.agent.outcome import Outcome
from cluster_ddp.agent.rank_notes import read_regular
from cluster_ddp.files import atomic_write
from cluster_ddp.protocol import File

_BYTES = 4096
_SPEC_BYTES = 8 << 20


class Turn(NamedTuple):
    """The last start of a packed task."""

    starts: int
    """How often it was started, with this one."""
    requeues: int
    """How often Slurm had started the job that holds it again before."""
    time: float
    """When, in seconds of UNIX time."""


NONE = Turn(0, 0, 0.0)
"""Of a task that has not been started."""


def begin(folder: Path, turn: Turn, *, shared: bool) -> bool:
    """Note a start. Returns whether it is noted: the disk may be full."""
    try:
        with atomic_write(folder / File.PACKED, shared=shared) as file:
            file.write(json.dumps(turn._asdict()).encode() + b"\n")
    except OSError:
        return False
    return True


def last(folder: Path) -> Turn:
    """Return the last start; `NONE` if there is none, or it can't be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(read_regular(folder / File.PACKED, _BYTES))
        return Turn(int(found["starts"]), int(found["requeues"]), float(found["time"]))
    return NONE


def final(folder: Path, label: str) -> Outcome | None:
    """Return how a task has ended for good; None if it has not, and is to be started (again)."""
    ended = noted(folder, label)
    return None if ended is None or ended.requeued else ended


def noted(folder: Path, label: str) -> Outcome | None:
    """Return how the task's last start has ended that has; None if none has, or it can't be read."""
    with contextlib.suppress(OSError, ValueError):
        ended = outcome.read(folder)
        return ended if ended is not None and ended.job == label else None
    return None


def stopped(ended: Outcome | None, turn: Turn) -> bool:
    """Whether the last start was stopped in time, and the task waits for another."""
    return ended is not None and ended.requeued and ended.state == "STOPPED" and ended.time >= turn.time


def is_elsewhere(folder: Path, label: str) -> bool:
    """Whether a task's run directory is gone, or has become another job's by `submit --resume`."""
    try:
        return bool(json.loads(read_regular(folder / File.SPEC, _SPEC_BYTES))["job"] != label)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):  # it can't be read now
        return False
