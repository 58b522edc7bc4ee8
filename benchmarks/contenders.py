"""The scripts that train the MNIST CNN in these benchmarks. Each runs in its own processes, which take turns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BASELINES = Path(__file__).parent / "baselines"
# Steps of a turn. One process's epoch has 937 whole batches of 64: enough for 35 turns after those to warm up.
WARMUP, STEPS = 5, 20
TURNS_TO_WARM_UP = 2
ENDS_WITHIN_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to train the CNN."""

    name: str
    script: str
    """Its file in baselines/."""
    options: tuple[str, ...] = ()
    at_least: float | None = None
    """The target, in multiples of a peer's samples per second."""
    dtype: str = "fp32"
    """The dtype of its matrix products."""
    python: str = sys.executable
    """The Python of the environment that has what it needs."""
    needs: str = ""
    """A module that this environment may lack."""

    def is_installed(self) -> bool:
        """Whether its environment has what it needs."""
        check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({self.needs!r}) is None)"
        return not self.needs or subprocess.run([self.python, "-c", check]).returncode == 0


DOCUMENTS = Contender(name="the documents' script", script="documents.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What one process measured in one turn."""

    samples: int
    seconds: float
    waited_s: float
    """How many of the seconds it waited for data."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of this process alone."""
        return self.samples / self.seconds


class Team:
    """Processes of one contender. They take their turns together, and sleep while others have theirs.

    All are started once, and turns are short. So other load on the machine hits all contenders alike, and few turns of
    each.

    Args:
        contender: which one.
        data_dir: the root of torchvision's MNIST class.
        cores: the cores of each process, which has a thread on each of them.
        is_one_training: whether the processes are the ranks of one training; else each is a world of one.
    """

    def __init__(
        self, contender: Contender, data_dir: Path, cores: Sequence[Sequence[int]], *, is_one_training: bool = False
    ) -> None:
        turn = ("--paced", f"--warmup={WARMUP}", f"--steps={STEPS}")
        script = str(BASELINES / contender.script)
        self._command = [contender.python, script, f"--data-dir={data_dir}", *turn, *contender.options]
        self._cores = cores
        self._worlds = _ranks(len(cores)) if is_one_training else [{}] * len(cores)
        self._processes: list[subprocess.Popen[str]] = []
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  # removed with the team

    def __enter__(self) -> Team:
        """Start the processes and warm them up."""
        for cores, world in zip(self._cores, self._worlds):
            process = subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, cores)), *self._command],
                env={**os.environ, "OMP_NUM_THREADS": str(len(cores)), **world},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
            )
            self._processes.append(process)
        for _ in range(TURNS_TO_WARM_UP):
            self.turn()
        return self

    def turn(self) -> list[Block]:
        """Let all processes train for some steps, at the same time."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [self._block(process) for process in self._processes]

    def _block(self, process: subprocess.Popen[str]) -> Block:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), None)
        if line is None:
            self._complaints.seek(0)
            sys.exit(f"{process.args!r} ended with status {process.wait()}:\n{self._complaints.read()[-2000:]}")
        return Block(**json.loads(line))

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _ranks(count: int) -> list[dict[str, str]]:
    """The environments of the ranks of one training, as torchrun sets them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
