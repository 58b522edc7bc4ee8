"""The turns of a job that is held by another: that one starts it, again and again, as Slurm would.

They are in its journal: the agent of the job that holds it notes each, `status` reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cluster_ddp.run import journal
from cluster_ddp.run.journal import Event
from cluster_ddp.run.outcome import Outcome


class Turn(NamedTuple):
    """One start of such a job."""

    starts: int
    """How often it was started, with this one."""
    requeues: int
    """How often Slurm had started the job that holds it again before."""
    time: float
    """When, in seconds of UNIX time."""

    def is_stopped(self, ended: Outcome | None) -> bool:
        """Whether it was stopped in time, as the job's last end says, and the job waits for another turn."""
        return ended is not None and ended.starts_again and ended.state == "STOPPED" and ended.time >= self.time


NONE = Turn(0, 0, 0.0)
"""Of a job that has not been started."""


def begin(folder: Path, label: str, turn: Turn, *, shared: bool) -> bool:
    """Note a turn of a job with this label. Returns whether it is noted: the disk may be full."""
    return journal.append(folder, Event.TURN, shared=shared, job=label, **turn._asdict())


def last(folder: Path, label: str) -> Turn:
    """Return the last turn of a job; `NONE` if there is none, or it can't be read."""
    turn = NONE
    for one in journal.events(folder):
        starts, requeues = one.get("starts"), one.get("requeues")
        if one.get("event") == Event.TURN and one.get("job") == label and type(starts) is type(requeues) is int:
            turn = Turn(starts, requeues, one["time"])
    return turn
