"""What observing a training costs it: `torchrun --nproc-per-node 2 benchmarks/observing.py`.

The share of training time (MNIST CNN) that the times of the steps take, without two looks at a clock in each step of
the optimizer; the CPU time of the thread that samples the node (without control groups of Slurm's, it looks at /proc,
which is the dearer way); and what world.log takes, if each step logs a record of four numbers.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from record import Figure, report
from stop_agreement import WARMUP, Training

import cluster_ddp
from cluster_ddp.runtime.profiling import node_usage
from cluster_ddp.runtime.profiling.step_times import StepTimes

PERCENT_AT_MOST = 1.0


class Timed(StepTimes):
    """Takes the time that taking times takes."""

    taken_s = 0.0

    def begin(self) -> None:
        """Begin, timed."""
        start_s = time.perf_counter()
        super().begin()
        self.taken_s += time.perf_counter() - start_s

    def end(self) -> None:
        """End, timed."""
        start_s = time.perf_counter()
        super().end()
        self.taken_s += time.perf_counter() - start_s

    @property
    def own_s(self) -> float:
        """What a step costs this rank, timed."""
        start_s = time.perf_counter()
        found = super().own_s
        self.taken_s += time.perf_counter() - start_s
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="number of runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="training steps in each run (default: %(default)s)")
    options = parser.parse_args()
    with cluster_ddp.distributed(cuda=False) as world:
        folder = Path(world.gather(tempfile.mkdtemp() if world.is_main else "")[0])
        training = Training(world, folder, 64)
        parts = [training.model, training.optimizer]
        training.checkpoint._boundary.times = timed = Timed([], parts, world_size=world.world_size)
        for _ in range(WARMUP):
            training.step()
        rows = [run(training, timed, options.steps) for _ in range(options.runs)]
        if world.is_main:
            step_ms, times, sampling, logging = zip(*rows)
            report(
                Figure(what="a step", values=step_ms, unit="ms"),
                Figure(what="times of the steps", values=times, unit="% of the time", at_most=PERCENT_AT_MOST),
                Figure(what="sampling the node", values=sampling, unit="% of a CPU", at_most=PERCENT_AT_MOST),
                Figure(what="a record a step", values=logging, unit="% of the time", at_most=PERCENT_AT_MOST),
            )
            shutil.rmtree(folder)


def run(training: Training, timed: Timed, steps: int) -> tuple[float, float, float, float]:
    """Milliseconds per step; percent of the time for its times on the slowest rank, of a CPU for sampling, of a log."""
    timed.taken_s, cpu_s, start_s = 0.0, sampling_s(), time.perf_counter()
    step_ms, _ = training.run(steps)
    taken_s = time.perf_counter() - start_s
    times = max(training.world.gather(100 * timed.taken_s / taken_s))
    sampling = 100 * (sampling_s() - cpu_s) / taken_s
    return step_ms, times, sampling, 100 * logging_s(training, steps) / (step_ms / 1000)


def logging_s(training: Training, steps: int) -> float:
    """The seconds of a call of world.log on the slowest rank, while its thread writes the records."""
    start_s = time.perf_counter()
    for step in range(steps):
        training.world.log("train", epoch=1, loss=1 / (step + 1), lr=0.1, samples_per_s=1000.0)
    return max(training.world.gather((time.perf_counter() - start_s) / steps))


def sampling_s() -> float:
    """The CPU seconds of this process's sampling so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(one._thread.ident or 0))
        for one in node_usage._running
        if one._thread.is_alive()
    )


if __name__ == "__main__":
    main()
