"""How long a recipe takes: `python benchmarks/speedrun.py [--recipe fast] [--seeds 30] [--data-dir data]`.

A run is `python -m cluster_ddp.train` without the imports: it reads MNIST, trains, tests after each epoch, and writes
checkpoints and records. All runs are in one process, one after another. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from record import Figure, report

from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.mnist.training import run

SECONDS_AT_MOST = {"fast": 15.0, "reference": None}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=SECONDS_AT_MOST, default="fast", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=30, help="runs, each with its own seed (default: %(default)s)")
    parser.add_argument("--amp", choices=("off", "bf16"), help="default: the recipe's")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    seconds, accuracies = zip(*(_run(arguments, seed) for seed in range(1, arguments.seeds + 1)))
    mean, spread = statistics.fmean(accuracies), statistics.pstdev(accuracies)
    runs = f"{arguments.recipe} recipe, {arguments.amp or 'its own precision'}, one process"
    report(
        Figure(what=f"{runs}: time", values=seconds, unit="s", at_most=SECONDS_AT_MOST[arguments.recipe]),
        Figure(what=f"{runs}: mean accuracy", values=[round(100 * mean, 3)], unit="%", at_least=99.0),
        Figure(what=f"{runs}: accuracy of each seed", values=[100 * one for one in accuracies], unit="%"),
        standard_deviation=round(100 * spread, 3),
    )


def _run(arguments: argparse.Namespace, seed: int) -> tuple[float, float]:
    """One run: its seconds, and the accuracy after the last epoch."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        config = TrainConfig(
            recipe=arguments.recipe,
            amp=arguments.amp,
            seed=seed,
            data_dir=arguments.data_dir,
            run_dir=Path(folder),
            log_interval=100,
        )
        start = time.perf_counter()
        run(config)
        seconds = time.perf_counter() - start
        records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return seconds, [record["accuracy"] for record in records if record["kind"] == "test"][-1]


if __name__ == "__main__":
    main()
