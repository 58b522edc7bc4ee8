"""One rank's exception, printed once, with its rank and host.

When one rank fails, the collectives of all the others fail after it; their tracebacks would bury the one that matters.
So the first to fail leaves its name in the store, before its connections close, and the others print one line that
points at it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from cluster_ddp.errors import ClusterDDPError

if TYPE_CHECKING:
    import torch.distributed as dist

    from cluster_ddp.slurm.environment import Topology

_KEY = "first_failure"
# Errors before the ranks have met are often every rank's; the first of each node tells them. The others wait this long;
# by then srun (--kill-on-bad-exit) has ended them, unless the first rank of the node never ran.
_SILENCE_S = 4.0
# Rank 0 serves the store: it stays this long after its own failure, so that the others can ask who failed.
_LAST_WORDS_S = 1.0


class FailureReporter:
    """Prints a rank's failure as "[rank 3 node2] …", once for the whole run."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        """This rank's place, once it is known."""
        self.store: dist.Store | None = None
        """What the ranks share, once they have met."""
        self._reported: BaseException | None = None

    def install(self) -> None:
        """Take the place of sys.excepthook."""
        sys.excepthook = self._excepthook

    def report(self, error: BaseException) -> None:
        """Print an exception, or, where another rank failed first, one line that points there.

        To be called before this rank's connections close, so that nobody fails of that before the name is known.
        """
        self._reported = error
        name = f"rank {self._rank()} on {socket.gethostname()}"
        first = self._first_failure(name)
        if first != name:
            self._print(f"stopped: {first} failed (see its error).")
        elif isinstance(error, ClusterDDPError):
            self._print(f"error: {error}")
        else:
            self._print("".join(traceback.format_exception(error)).rstrip())

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not self._reported:
            local_rank = self.topology.local_rank if self.topology else self._local_rank()
            if self.store is None and local_rank != 0 and isinstance(error, ClusterDDPError):
                time.sleep(_SILENCE_S)
            self.report(error)
        if self.store is not None and self._rank() == "0":
            time.sleep(_LAST_WORDS_S)

    def _first_failure(self, name: str) -> str:
        if self.store is None:
            return name
        try:
            return str(self.store.compare_set(_KEY, "", name), "utf-8")
        except Exception:  # the store went with rank 0: nobody knows who was first, so this rank tells its own
            return name

    def _rank(self) -> str:
        if self.topology is not None:
            return str(self.topology.rank)
        return os.environ.get("SLURM_PROCID") or os.environ.get("RANK") or "?"

    @staticmethod
    def _local_rank() -> int:
        with contextlib.suppress(ValueError):
            return int(os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK") or 0)
        return 0

    def _print(self, text: str) -> None:
        # One write: lines of several ranks that share a log don't mix.
        sys.stderr.write(f"[rank {self._rank()} {socket.gethostname()}] {text}\n")
        sys.stderr.flush()
