"""Agents of tasks, started as srun starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OURS = ("SLURM", "SUBMITIT", "CLUSTER_DDP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
PLACE = {
    **{name: value for name, value in os.environ.items() if not name.startswith(_OURS)},
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "PYTHONPATH": str(ROOT)},
}
AT_ONCE = {"CLUSTER_DDP_NOTES": os.devnull}
"""An agent below another one passes signals on without waiting to see whether Slurm has told the command, too."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


def start(
    *command: str,
    options: tuple[str, ...] = (),
    program: tuple[str, ...] = (),
    agent: tuple[str, ...] = ("-m", "cluster_ddp.agent"),
    **env: str,
) -> subprocess.Popen[str]:
    """Start the agent of a task. It leads a process group of its own, as a task of Slurm does."""
    agent = (sys.executable, *agent, "task", *options, "--", *command)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*program, *agent], env={**PLACE, **env}, start_new_session=True, **pipes)


@contextmanager
def started(*command: str, **more: object) -> Iterator[subprocess.Popen[str]]:
    """Start the agent of a task. Nothing of it is left after the body."""
    task = start(*command, **more)
    try:
        yield task
    finally:
        for end in (lambda: os.killpg(task.pid, signal.SIGKILL), task.kill):
            try:
                end()
            except ProcessLookupError:
                continue
        task.communicate()
