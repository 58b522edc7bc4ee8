"""Which processes are settled: not one that waits for a core since it was forked, or that has ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from slowness import stays, wait_until

from cluster_ddp import processes


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    if not (pid := os.fork()):
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(PermissionError):  # only root may
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))  # with SCHED_IDLE, it may take long to end
        os.waitpid(pid, 0)


def spin(policy: int = os.SCHED_OTHER) -> None:
    """Use the first core, all of it or, with SCHED_IDLE, what others leave."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, policy, os.sched_param(0))
    while True:
        pass


@pytest.mark.parametrize("work", [signal.pause, spin])
def test_a_process_that_runs_is_settled_in_a_while(work: Callable[[], object]) -> None:
    with forked(work) as pid:
        wait_until(lambda: processes.is_settled(pid))


def test_a_process_that_has_waited_for_a_core_since_is_not_settled() -> None:
    with forked(spin), forked(lambda: spin(os.SCHED_IDLE)) as pid:
        stays(lambda: not processes.is_settled(pid))


def test_a_process_that_has_ended_is_not_settled() -> None:
    with forked(lambda: None) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        stays(lambda: not processes.is_settled(pid), 0.2)
    assert not processes.is_settled(pid)
