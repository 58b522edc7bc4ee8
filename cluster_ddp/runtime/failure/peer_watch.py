"""End a rank when another rank has failed or its communicator has, if it can't notice that by itself.

On CPUs it can: gloo's collectives fail with the connection. On GPUs a rank waits in a kernel for a rank that never
comes, and often in C++, where no Python signal handler runs. srun (--kill-on-bad-exit) sends TERM, which a training
handles in Python only, and KILL after KillWait (30 s). So a thread asks the store for failures, and NCCL for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cluster_ddp.run.names import Kind
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.failure.error_report import FailureReporter

_EVERY_S = 1.0
# The store's thread on rank 0 needs 19 µs per request: all ranks together may use a fiftieth of its time.
_EVERY_S_PER_RANK = 1e-3
# How long the rank's own Python code has to notice the failure of another rank and end.
_GRACE_S = 5.0


class PeerWatch:
    """A thread that polls for failures of other ranks, and then ends this process unless it ends by itself.

    Args:
        is_busy: returns whether this rank's device has unfinished work: then it waits for other ranks. A rank whose
            device is idle is not ended: the others may wait for it.
        own_error: returns what is wrong with this rank's communicator; None if nothing is.
    """

    def __init__(
        self,
        reporter: FailureReporter,
        is_busy: Callable[[], bool],
        world_size: int,
        own_error: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        self._reporter, self._is_busy, self._own_error = reporter, is_busy, own_error
        self._error: Exception | None = None
        self._every_s = max(_EVERY_S, _EVERY_S_PER_RANK * world_size)
        self._failed, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the rank's own code ends it."""
        self._stopped.set()

    def has_failed(self) -> bool:
        """Return whether another rank has failed.

        Raises:
            CommunicatorError, DeviceTimeoutError: this rank's communicator has failed.
        """
        if self._error is not None:
            raise self._error
        return self._failed.is_set()

    def _watch(self) -> None:
        while not self._reporter.somebody_failed():
            if error := self._own_error():
                self._end_for(error)
                return
            if self._stopped.wait(self._every_s):
                return
        self._failed.set()
        # Now: before a rank that timed out lists those that don't answer, and before rank 0 is gone.
        words = self._reporter.answer() if self._is_busy() else None
        if self._stopped.wait(_GRACE_S):
            return
        if not self._is_busy():
            # This rank may still work, or hang: it must not look as if it had answered.
            self._stopped.wait()
            return
        self._reporter.say(words or self._reporter.answer(), kind=Kind.PEER)
        self._reporter.linger()
        process_exit.now(1)

    def _end_for(self, error: Exception) -> None:
        """Report this rank's own error, unless its own code does, once it next waits for its device."""
        self._error = error
        while not self._stopped.wait(_GRACE_S):
            if self._is_busy():  # with a collective that will never end
                self._reporter.report(error)
                self._reporter.linger()
                process_exit.now(1)
