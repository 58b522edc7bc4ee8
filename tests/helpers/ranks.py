"""Run a function in several rank processes on this machine, each with an environment of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from slowness import LIMIT_S, scaled

from cluster_ddp.processes import end_with_parent

# What torch may write: gloo of 2.10 at every start; both where the machine's name is not known, or not in time.
_TORCHS = re.compile(
    r"^(\[Gloo\]|\[W\d+ .*(\[c10d\] The hostname of the client socket|Unable to resolve hostname)).*\n", re.MULTILINE
)

# On a machine that does not know its own name, torchrun waits for minutes.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node=2")
"""Arguments of Python: torchrun with two ranks."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "cluster_ddp.mnist.training"])


_JOB_IDS = itertools.count(os.getpid() % 60_000 * 1000, 20)


def job_ids() -> int:
    """The first of 20 ids of jobs that no other module and no other test process has: two jobs of one id would meet."""
    return next(_JOB_IDS)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    exit_code: int | None
    """None if it had to be killed at the time limit."""
    output: str
    """What it wrote to stdout and stderr, without `_TORCHS`."""


def run_ranks(
    function: Callable[[], None],
    environments: list[Mapping[str, str]],
    folder: Path,
    timeout_s: float = LIMIT_S,
    hanging: int | None = None,
) -> list[Outcome]:
    """Run `function` once per environment, all at once; their ends in the order of the environments.

    `hanging` does not end by itself: it is killed once all others have ended.
    """
    logs = [folder / f"rank{i}.log" for i in range(len(environments))]
    processes = [
        _context.Process(target=_main, args=(function, dict(env), log)) for env, log in zip(environments, logs)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != hanging:
            process.join(scaled(timeout_s))
    killed = [process.is_alive() for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    ends = [
        Outcome(None if was_killed else process.exitcode, _TORCHS.sub("", log.read_text()))
        for process, log, was_killed in zip(processes, logs, killed)
    ]
    for process in processes:
        process.close()  # its two open files would stay open until garbage is collected
    return ends


def _end_with_the_tests() -> None:
    """Let this rank end with the forkserver, and that with the process of the tests, however it ends.

    The forkserver lives as long as this descriptor is open anywhere, and each of its children gets it.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    end_with_parent(signal.SIGKILL, os.getppid())


def _main(function: Callable[[], None], env: dict[str, str], log: Path) -> None:
    _end_with_the_tests()
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_"))]:
        del os.environ[name]
    os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env})
    status = 0
    try:
        function()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def slurm_step(rank: int, world_size: int, *, job_id: int, nodelist: str = "localhost", **more: str) -> dict[str, str]:
    """The environment of a task of a one-node step, as srun would set it."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": str(world_size),
        **more,
    }
