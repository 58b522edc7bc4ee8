"""One start of a job's ranks: how it began, how it ended, and what followed, as the journal says."""

from __future__ import annotations

import time
from typing import NamedTuple

from cluster_ddp.run.names import Then
from cluster_ddp.run.outcome import Outcome

NO_CHECKPOINT = "none"

_THEN = {Then.RESTART: "Restarted in the allocation", Then.REQUEUE: "Requeued"}


class Failed(NamedTuple):
    """How one start of the ranks failed, and what followed."""

    time: float
    """When, in seconds of UNIX time."""
    start: int
    """Number of starts before it, in this job: restarts and requeues."""
    node: str
    """Where it failed first; empty if unknown."""
    rank: int | None
    """Which rank failed first; None if it was a task of several, or a whole node."""
    words: str
    """Why, in one line; empty if only the status is known."""
    kind: str = ""
    """One of `Kind`; empty if unknown."""
    step: int | None = None
    """Step of the training at which an exception was raised; None if unknown."""
    checkpoint: str = NO_CHECKPOINT
    """Name of the newest checkpoint; "none" without one; empty if unknown, as without a run directory."""
    on_all_ranks: bool = False
    """Whether all ranks failed with these words."""
    lost_s: float | None = None
    """Seconds of the training that have to be done again: since the newest checkpoint, or the start."""
    then: str = Then.END
    """What followed: one of `Then`."""
    without: tuple[str, ...] = ()
    """Nodes that were left out from then on."""
    suspended: bool = False
    """Whether the job had been suspended just before, for minutes: ranks that wait for each other then time out."""
    micro_batch: int | None = None
    """Most samples of a rank in a batch from then on, as the memory of a GPU was too small; None if that stays."""
    mem_mb: int | None = None
    """Memory of each node that the job asks for then, in MiB, as what it had was too small; None if that stays."""

    @property
    def is_counted(self) -> bool:
        """Whether it counts towards --restarts: not if the next start differs in what this one lacked."""
        return not self.suspended and self.micro_batch is None and self.mem_mb is None

    @property
    def when(self) -> str:
        """When, in the local time of this machine."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))

    @property
    def text(self) -> str:
        """What failed and what followed, in words."""
        where = f" on {self.node}" if self.node else ""
        who = self.node or "Unknown rank" if self.rank is None else f"Rank {self.rank}{where}"
        then = _THEN.get(self.then, "The job ended")
        without = f", without {', '.join(self.without)}" if self.without else ""
        lost = "" if self.lost_s is None else f" Lost: {self.lost_s:.0f} s."
        return f"{who}: {self.words.rstrip('.') or 'no reason is known'}. {then}{without}.{lost}"


class Start(NamedTuple):
    """One start of a job's ranks. Times are in seconds of UNIX time."""

    job: str
    """The job's label: 12, or 12_3 for an array task."""
    number: int
    """Number of starts before it, in this job: restarts and requeues."""
    id: int | None = None
    """What its ranks call it in their records (`Env.START_ID`); None if unknown."""
    requeue: int | None = None
    """How often Slurm had started the job again before."""
    nodes: tuple[tuple[float, int], ...] = ()
    """From when on the job had how many nodes; empty on this machine, and if its beginning is not noted."""
    training: int = 0
    """How many of them train."""
    gpus: int | None = None
    """GPUs of each node."""
    end: Outcome | None = None
    """How it ended; None if that is not noted."""
    failed: Failed | None = None
    """If it failed, and restarts were asked for: what they are decided by."""
    saved: float | None = None
    """When the newest checkpoint was saved, at its end, 0 without one; None if its end is not noted."""
    over: float | None = None
    """When the job ended after it; None if it did not, or that is not noted."""
