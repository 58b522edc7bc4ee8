"""How a rank ended, as the process around it says: the words of a rank, on their way to the job's agent."""

from __future__ import annotations

import signal
from typing import NamedTuple

from cluster_ddp.run.names import Kind


class End(NamedTuple):
    """How a rank ended, as its supervisor says."""

    rank: int
    host: str
    status: int
    """Its exit status; 128 + N if signal N ended it."""
    words: str = ""
    """Why it failed, as it has noted itself."""
    failure_kind: str = ""
    """Why in one word, as it has noted itself: one of `Kind`."""
    is_oom: bool = False
    """Whether the kernel has killed a process beside it for memory."""
    was_stopped: bool = False
    """Whether it has noted that it was stopped in time."""
    step: int | None = None
    """Number of steps of the training that were done, as it has noted itself; None if unknown."""
    micro_batch: int | None = None
    """As it has noted itself: see `FailureNote`."""

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank did, or was gone."""
        return self.failure_kind in (Kind.PEER, Kind.SAW_PEERS)

    @property
    def speaks_for_all(self) -> bool:
        """Whether it says where the other ranks were: those that it waited for may not be able to."""
        return self.failure_kind in (Kind.HANG, Kind.SAW_PEERS)

    @property
    def how(self) -> str:
        """In words: "ended with status 3", "was killed by SIGKILL"."""
        if self.status - 128 in {*signal.Signals}:
            return f"was killed by {signal.Signals(self.status - 128).name}"
        return f"ended with status {self.status}"
