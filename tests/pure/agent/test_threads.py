"""Threads that take no signals."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from cluster_ddp import processes
from cluster_ddp.agent.job import slurm_commands


def blocked(status: str) -> set[int]:
    """The signals that a process blocks, by its status in /proc."""
    mask = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_the_end_of_a_child_reaches_the_thread_that_waits_for_it() -> None:
    """With another thread that takes SIGCHLD, a job's agent could wait an hour for a child that had ended."""
    before, found = signal.pthread_sigmask(signal.SIG_BLOCK, ()), list[str]()
    thread = processes.start_thread(lambda: found.append(Path("/proc/thread-self/status").read_text()), "test")
    thread.join()
    assert thread.daemon
    assert blocked(found[0]) >= {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_term_ends_a_command_of_slurms_that_such_a_thread_has_started() -> None:
    """A squeue that waits for its controller would keep the node until KILL."""
    found: list[bool] = []

    def ask() -> None:
        for outlives in (False, True):
            answer = slurm_commands.ask(["cat", "/proc/self/status"], {"PATH": "/usr/bin:/bin"}, outlives_term=outlives)
            found.append(signal.SIGTERM in blocked(answer.words))

    processes.start_thread(ask, "test").join()
    assert found == [False, True]
