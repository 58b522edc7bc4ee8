"""What a second rank costs: `python benchmarks/weak_scaling.py`.

It compares the speed of each of two ranks of one training, each with its own core and the same samples a step, with one
rank on one of these cores. Communication (gloo) and what the cores share (memory, caches, clock) take their parts. Two
independent processes at the same time lose only the second part: compared with them, the loss is communication. Two
ranks that meet in each step but exchange no gradients show how much of it is waiting for the rank that is slower just
then. Our training and the documents' script take short turns, in rounds.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from contenders import DOCUMENTS, Contender, Team
from record import Figure, report, unable

# The target, as a share of the speed of a rank that is alone.
AT_LEAST = 0.92
OURS = Contender(name="cluster_ddp", script="ours.py", at_least=AT_LEAST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Samples per second of each rank, or each process."""

    alone: float
    together: float
    apart: float
    waiting: float = math.nan
    """NaN if the contender can't leave the gradients out."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the root of torchvision's MNIST class")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each (default: %(default)s)")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        unable("it needs two cores")
    rounds: dict[str, list[Round]] = {DOCUMENTS.name: [], OURS.name: []}
    with ExitStack() as stack:
        ways = {one.name: start(stack, one, options.data_dir, cores) for one in (DOCUMENTS, OURS)}
        for _ in range(options.rounds):
            for name, teams in ways.items():
                speeds = {way: mean(block.samples_per_s for block in team.turn()) for way, team in teams.items()}
                rounds[name].append(Round(**speeds))
    report(*figures(DOCUMENTS, rounds[DOCUMENTS.name]), *figures(OURS, rounds[OURS.name]))


def start(stack: ExitStack, one: Contender, data_dir: Path, cores: Sequence[int]) -> dict[str, Team]:
    """Start a contender's teams, one for each field of `Round`."""
    each = [[core] for core in cores]
    teams = {
        "alone": Team(one, data_dir, each[:1]),
        "together": Team(one, data_dir, each, is_one_training=True),
        "apart": Team(one, data_dir, each),
    }
    if one is OURS:
        teams["waiting"] = Team(replace(one, options=("--only-wait",)), data_dir, each, is_one_training=True)
    return {way: stack.enter_context(team) for way, team in teams.items()}


def figures(one: Contender, rounds: Sequence[Round]) -> list[Figure]:
    """A contender's figures."""
    apart, waiting = median(a.apart / a.alone for a in rounds), median(a.waiting / a.alone for a in rounds)
    limits = [f"two processes apart: {apart:.3f}"]
    if not math.isnan(waiting):
        limits.append(f"ranks that only wait for each other: {waiting:.3f}")
    together = Figure(
        what=f"{one.name}: each of two ranks",
        values=[a.together for a in rounds],
        unit="samples/s",
        ratios=[a.together / a.alone for a in rounds],
        peer="one rank alone",
        limit="; ".join(limits),
        at_least=one.at_least,
    )
    return [
        Figure(what=f"{one.name}: one rank alone", values=[a.alone for a in rounds], unit="samples/s"),
        together,
        replace(together, ratios=[a.together / a.apart for a in rounds], peer="two processes apart", limit=""),
    ]


if __name__ == "__main__":
    main()
