"""Ranks of an earlier start of this job on this node: a new start needs their GPUs, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping

from cluster_ddp import processes
from cluster_ddp.errors import JobError
from cluster_ddp.protocol import Env
from cluster_ddp.slurm.variables import node_name

PATIENCE_S = 60.0
"""Seconds until a killed process has to be gone. The kernel may have to wait for a driver or a file system."""


def kill(env: Mapping[str, str]) -> None:
    """Kill the task's predecessors: the commands of this place in earlier starts of the job. Wait for their ends.

    Args:
        env: of the task.

    Raises:
        JobError: one does not end.
    """
    of_place = {name: env[name] for name in (Env.SECRET, "SLURMD_NODENAME", "SLURM_LOCALID")}
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid, of_it in processes.environments(of_place).items() if _is_earlier(of_it, env)]:
        if time.monotonic() > deadline:
            found = f"process {left[0]} of an earlier start does not end within {PATIENCE_S:g} s of KILL."
            raise JobError(f"Starting a rank on {node_name(os.environ)}:", found, "the node is at fault: leave it out")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_earlier(found: Mapping[str, str], env: Mapping[str, str]) -> bool:
    return Env.NOTES in found and found.get(Env.START) != env[Env.START]  # agents have no notes
