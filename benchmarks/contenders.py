"""Who trains the MNIST CNN in these benchmarks, and how they run: processes of their own on cores of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BASELINES = Path(__file__).parent / "baselines"
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to train it."""

    name: str
    script: str
    """In baselines/."""
    options: tuple[str, ...] = ()
    at_least: float | None = None
    """The target: times the samples per second of the documents' script."""
    dtype: str = "fp32"
    """What it multiplies."""
    python: str = sys.executable
    """Of the environment that has what it needs."""
    needs: str = ""
    """A module which that environment may lack."""

    def is_installed(self) -> bool:
        """Whether its environment has what it needs."""
        check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.needs!r}) is None)"
        return not self.needs or subprocess.run([self.python, "-c", check], timeout=TIMEOUT_S).returncode == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one process has measured."""

    samples_per_s: float
    waiting_share: float
    """Of the time, waiting for data."""
    steps: int


DOCUMENTS = Contender(name="the documents' script", script="documents.py")


def train(contender: Contender, options: Sequence[str], *, cores: Sequence[int]) -> Run:
    """Run one process, with a thread on each of the cores."""
    return _result(_start(contender, options, cores, {}))


def train_apart(contender: Contender, options: Sequence[str], *, cores: Sequence[int]) -> list[Run]:
    """Run a process of its own on each of the cores, all at the same time, which know nothing of each other."""
    return [_result(process) for process in [_start(contender, options, [core], {}) for core in cores]]


def train_together(contender: Contender, options: Sequence[str], *, cores: Sequence[int]) -> list[Run]:
    """Run one training with a rank on each of the cores, in an environment such as torchrun makes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    count = str(len(cores))
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        _start(contender, options, [core], {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, core in enumerate(cores)
    ]
    return [_result(process) for process in processes]


def _start(
    contender: Contender, options: Sequence[str], cores: Sequence[int], world: dict[str, str]
) -> subprocess.Popen[str]:
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))]
    command = [*pinned, contender.python, str(BASELINES / contender.script), *options, *contender.options]
    env = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), **world}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _result(process: subprocess.Popen[str]) -> Run:
    try:
        output, complaints = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        sys.exit(f"{process.args!r}\nended with status {process.returncode}:\n{complaints[-2000:]}")
    return Run(**json.loads(output.splitlines()[-1]))
