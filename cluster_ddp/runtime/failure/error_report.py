"""One rank's exception, printed once, with its rank and host.

When one rank fails, the collectives of all the others fail after it; their tracebacks would bury the one that matters.
So the first to fail leaves its name in the store, before its connections close, and the others print one line that
points at it. Where it fails of waiting too long for the others, the ranks that have nothing to say are named.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.runtime.device.nonblocking_wait import DeviceTimeoutError, PeerFailedError
from cluster_ddp.runtime.output import complain
from cluster_ddp.runtime.rendezvous import arrivals

if TYPE_CHECKING:
    import torch.distributed as dist

    from cluster_ddp.slurm.topology import Topology

_KEY = "first_failure"
_STORE_IS_GONE = "stopped: rank 0, which serves the ranks' store, is gone."
# Errors before the ranks have met are often every rank's; the first of each node tells them. The others wait this long;
# by then srun (--kill-on-bad-exit) has ended them, unless the first rank of the node never ran.
_SILENCE_S = 4.0
# Rank 0 serves the store: after its own failure it stays until all others have asked who failed, or this long.
_LAST_WORDS_S = 5.0
# How long a rank that waited too long listens who else did; those that hang don't.
_ROLL_CALL_S = 3.0
# What gloo says of a collective that took too long, and of the next one after another has, such as the exchange of stop
# flags that runs beside the steps; and NCCL's watchdog.
_TIMEOUT_WORDS = ("timed out waiting", "application timeout caused pair closure", "watchdog")
# What gloo and torch's store say where another process has ended (gloo/transport/tcp: pair.cc, error.cc).
_LOST_WORDS = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "failed to recv")
# How long the store may take to answer: its server may be the one that hangs.
_STORE_PATIENCE_S = 5.0


class FailureReporter:
    """Prints a rank's failure as "[rank 3 node2] …", once for the whole run."""

    def __init__(self) -> None:
        self.topology: Topology | None = None
        """This rank's place, once it is known."""
        self.store: dist.Store | None = None
        """What the ranks share, once they have met."""
        self.collective_timeout_s = 0.0
        """How long a rank waits for the others."""
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
        first = self._ask_store(self._first_failure, name)
        if first not in (name, None):
            self.say(_stopped_by(first))
            if _is_timeout(error) or isinstance(error, PeerFailedError):
                # Ending now would make Slurm wake up the one that hangs, or end those that look who it is.
                time.sleep(_ROLL_CALL_S + 1.0)
        elif _is_timeout(error):
            self.say(f"error: {self._who_hangs(first is not None)}")
        elif first is None and _says(error, _LOST_WORDS):
            self.say(_STORE_IS_GONE)
        elif isinstance(error, ClusterDDPError):
            self.say(f"error: {error}")
        else:
            self.say("".join(traceback.format_exception(error)).rstrip())

    def somebody_failed(self) -> bool:
        """Whether a rank has reported a failure, or the store has gone, and rank 0 with it."""
        assert self.store is not None
        try:
            return self.store.check([_KEY])
        except Exception:
            return True

    def answer(self) -> str:
        """Who failed, in words, where that is another rank; from now on the others know that this one does not hang."""
        name = f"rank {self._rank()} on {socket.gethostname()}"
        first = self._ask_store(self._first_failure, name)
        if first in (name, None):
            return _STORE_IS_GONE
        return _stopped_by(first)

    def say(self, words: str) -> None:
        """Print words, with this rank and its host."""
        complain(f"[rank {self._rank()} {socket.gethostname()}] {words}")

    def linger(self) -> None:
        """On rank 0, which serves the store: wait until all others have asked who failed, or for some seconds."""
        if self.store is not None and self._rank() == "0":
            deadline = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < deadline and self._ask_store(self._absent, ""):
                time.sleep(0.1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not self._reported:
            local_rank = self.topology.local_rank if self.topology else self._local_rank()
            if self.store is None and local_rank != 0 and isinstance(error, ClusterDDPError):
                time.sleep(_SILENCE_S)
            self.report(error)
        self.linger()

    def _ask_store(self, question: Callable[[dist.Store, str], str], name: str) -> str | None:
        """What the store answers; None where it has gone, or doesn't answer in time. Before there is one, our name."""
        answers: list[str] = []
        store = self.store
        if store is None:
            return name

        def ask() -> None:
            with contextlib.suppress(Exception):  # it went with rank 0
                answers.append(question(store, name))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_STORE_PATIENCE_S + _ROLL_CALL_S)
        return answers[0] if answers else None

    def _first_failure(self, store: dist.Store, name: str) -> str:
        first = str(store.compare_set(_KEY, "", name), "utf-8")
        store.set(f"failed/{self._rank()}", "")  # rank 0 may go now, as far as this one is concerned
        return first

    def _who_hangs(self, store_answers: bool) -> ClusterDDPError:
        """The ranks that have not failed by now, too, while this one waited for them."""
        assert self.topology is not None
        hanging = "rank 0"
        if store_answers:
            time.sleep(_ROLL_CALL_S)
            hanging = self._ask_store(self._absent, "") or "some rank"
        return ClusterDDPError(
            f"Waiting {self.collective_timeout_s:g} s for the other ranks:",
            f"{hanging} did not answer: it hangs, was stopped, or its node is gone.",
            "look at that node and that rank's output; ranks that may be slower: --collective-timeout-s",
        )

    def _absent(self, store: dist.Store, name: str) -> str:
        assert self.topology is not None
        failed = [f"failed/{rank}" for rank in range(self.topology.world_size)]
        absent = [int(key.rpartition("/")[2]) for key in arrivals.unset(store, failed)]
        return ", ".join(f"rank {rank} on {host}" for rank, host in zip(absent, arrivals.hosts(store, absent)))

    def _rank(self) -> str:
        if self.topology is not None:
            return str(self.topology.rank)
        return os.environ.get("SLURM_PROCID") or os.environ.get("RANK") or "?"

    @staticmethod
    def _local_rank() -> int:
        with contextlib.suppress(ValueError):
            return int(os.environ.get("SLURM_LOCALID") or os.environ.get("LOCAL_RANK") or 0)
        return 0


def _stopped_by(other: str | None) -> str:
    return f"stopped: {other} failed (see its error)."


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective took too long, or our own wait for a GPU."""
    return isinstance(error, DeviceTimeoutError) or _says(error, _TIMEOUT_WORDS)


def _says(error: BaseException, parts: tuple[str, ...]) -> bool:
    """Whether this is an error of torch or gloo with any of these words; they have no types of their own for them."""
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in words for part in parts)
