"""What a second rank costs: `python benchmarks/weak_scaling.py`.

Two ranks of one training, each on a core of its own and with the same samples a step, against one rank on one of these
cores: the speed of each rank, of which communication (gloo) and what cores share (memory, caches, clock) take their
parts. Two processes at the same time that know nothing of each other lose the second part only: against them, what
is lost is communication. All in turn, in rounds, for ours and for the documents' script.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from contenders import DOCUMENTS, Contender, Run, train, train_apart, train_together
from record import Figure, report, unable

# Of the speed of a rank that is alone.
AT_LEAST = 0.92
OURS = Contender(name="cluster_ddp", script="ours.py", at_least=AT_LEAST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Samples a second of each rank, or each process."""

    alone: float
    together: float
    apart: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the root of torchvision's MNIST class")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of each run (default: %(default)s)")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        unable("it needs two cores")
    contenders = (DOCUMENTS, OURS)
    rounds = [[measure(one, options, cores) for one in contenders] for _ in range(options.rounds)]
    report(*(figure for one, its_rounds in zip(contenders, zip(*rounds)) for figure in figures(one, its_rounds)))


def measure(one: Contender, options: argparse.Namespace, cores: Sequence[int]) -> Round:
    """Run it in each of the three ways."""
    common = ["--data-dir", str(options.data_dir), "--steps", str(options.steps)]
    return Round(
        alone=_speed([train(one, common, cores=cores[:1])]),
        together=_speed(train_together(one, common, cores=cores)),
        apart=_speed(train_apart(one, common, cores=cores)),
    )


def _speed(runs: Sequence[Run]) -> float:
    return mean(run.samples_per_s for run in runs)


def figures(one: Contender, rounds: Sequence[Round]) -> list[Figure]:
    """What a contender's rounds say."""
    apart = median(a.apart / a.alone for a in rounds)
    together = Figure(
        what=f"{one.name}: each of two ranks",
        values=[a.together for a in rounds],
        unit="samples/s",
        ratios=[a.together / a.alone for a in rounds],
        peer="one rank alone",
        limit=f"two processes apart: {apart:.3f}",
        at_least=one.at_least,
    )
    return [
        Figure(what=f"{one.name}: one rank alone", values=[a.alone for a in rounds], unit="samples/s"),
        together,
        replace(together, ratios=[a.together / a.apart for a in rounds], peer="two processes apart", limit=""),
    ]


if __name__ == "__main__":
    main()
