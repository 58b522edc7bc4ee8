"""Ending a rank when another one has failed, where it can't see that by itself.

On CPUs it can: gloo's collectives fail with the connection. On GPUs it waits in a kernel for a rank that will never
come, and often in C++, where no signal handler of Python's runs. srun (--kill-on-bad-exit) sends TERM, to which a
training listens in Python only, and KILL after KillWait (30 s). So a thread asks the store for failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cluster_ddp.runtime.failure import hard_exit
from cluster_ddp.runtime.failure.error_report import FailureReporter

_EVERY_S = 1.0
# The store's thread on rank 0 takes 19 µs for a question: all ranks together may take a fiftieth of its time.
_EVERY_S_PER_RANK = 1e-3
# How long the rank's own Python code has, once another rank failed, to see that and end.
_GRACE_S = 5.0
_EXIT_STATUS = 1


class PeerWatch:
    """A thread that asks whether another rank has failed, and then ends this process unless that ends by itself.

    Args:
        reporter: of this rank's failures, which has the store.
        is_busy: whether this rank's device has work to do. One that has waits for others. One that has not, and does
            not end either, is what they wait for.
        world_size: number of ranks.
    """

    def __init__(self, reporter: FailureReporter, is_busy: Callable[[], bool], world_size: int) -> None:
        self._reporter, self._is_busy = reporter, is_busy
        self._every_s = max(_EVERY_S, _EVERY_S_PER_RANK * world_size)
        self._failed, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Leave it to the rank's own code how it ends."""
        self._stopped.set()

    def has_failed(self) -> bool:
        """Whether another rank has."""
        return self._failed.is_set()

    def _watch(self) -> None:
        while not self._reporter.somebody_failed():
            if self._stopped.wait(self._every_s):
                return
        self._failed.set()
        # Now, before somebody who waited in vain counts those that don't answer, and before rank 0 has gone.
        words = self._reporter.answer() if self._is_busy() else None
        if self._stopped.wait(_GRACE_S):
            return
        if not self._is_busy():
            # It may still be at work, or hang: it must not look as if it had answered.
            self._stopped.wait()
            return
        self._reporter.say(words or self._reporter.answer())
        self._reporter.linger()
        hard_exit.now(_EXIT_STATUS)
