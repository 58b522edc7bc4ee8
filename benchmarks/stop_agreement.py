"""What agreeing on when to stop costs: `torchrun --nproc-per-node 2 benchmarks/stop_agreement.py`.

It measures the share of training time (MNIST CNN) that `Checkpointer.step` takes when it saves nothing, and the time
from a signal on one rank until everything is saved and the process would end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from record import Figure, report

import cluster_ddp
from cluster_ddp.mnist.model import Net
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

PERCENT_AT_MOST = 0.5
WARMUP = 50


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs for each batch size (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="training steps in each run (default: %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 8], help="samples per rank and step")
    options = parser.parse_args()
    with cluster_ddp.distributed() as world:
        folder = Path(world.gather(tempfile.mkdtemp() if world.is_main else "")[0])
        found = [
            figure
            for batch_size in options.batch_sizes
            for figure in figures(Training(world, folder / str(batch_size), batch_size), options.runs, options.steps)
        ]
        if world.is_main:
            report(*found)
            shutil.rmtree(folder)


class Training:
    """The reference model, trained on noise."""

    def __init__(self, world: World, folder: Path, batch_size: int) -> None:
        self.world, self.batch_size = world, batch_size
        self.model = world.wrap(Net())
        self.optimizer = torch.optim.Adadelta(self.model.parameters())
        self.images = torch.randn(batch_size, 1, 28, 28, device=world.device)
        self.labels = torch.zeros(batch_size, dtype=torch.int64, device=world.device)
        self.checkpoint = cluster_ddp.Checkpointer(
            world,
            run_dir=RunDir(folder, world),
            every="never",
            model=self.model,
            optimizer=self.optimizer,
        )
        self._turns = self.checkpoint.until(10**9)

    def step(self) -> float:
        """Make one training step. Returns the seconds that agreeing took."""
        next(self._turns)
        self.optimizer.zero_grad()
        F.nll_loss(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        start_s = time.perf_counter()
        self.checkpoint.step()
        return time.perf_counter() - start_s

    def run(self, steps: int) -> tuple[float, float]:
        """Make steps. Returns milliseconds per step, and the highest percentage that agreeing took on any rank."""
        start_s = time.perf_counter()
        agreeing_s = sum(self.step() for _ in range(steps))
        taken_s = time.perf_counter() - start_s
        return 1000 * taken_s / steps, max(self.world.gather(100 * agreeing_s / taken_s))

    def stopped_after_s(self) -> float:
        """Seconds from a signal on the last rank until everything is saved on all ranks."""
        start_s = time.perf_counter()
        if self.world.rank == self.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        try:
            while True:
                self.step()
        except Stopped:
            return max(self.world.gather(time.perf_counter() - start_s))


def figures(training: Training, runs: int, steps: int) -> list[Figure]:
    """The figures of one batch size. A collective."""
    for _ in range(WARMUP):
        training.step()
    step_ms, percent = zip(*(training.run(steps) for _ in range(runs)))
    batch = f"batch {training.batch_size}"
    return [
        Figure(what=f"{batch}: a step", values=step_ms, unit="ms"),
        Figure(what=f"{batch}: agreeing", values=percent, unit="% of the time", at_most=PERCENT_AT_MOST),
        Figure(what=f"{batch}: stopped after", values=[training.stopped_after_s()], unit="s"),
    ]


if __name__ == "__main__":
    main()
