"""`cluster-ddp launch`: start the ranks of a job, and say how they ended. It is what a batch script ends with.

exec cluster-ddp launch -- python train.py                in a batch script, or in salloc
cluster-ddp launch --ranks 4 -- python train.py           on this machine, without Slurm
cluster-ddp launch --launcher torchrun -- python train.py --epochs 3

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Signals reach it once it can take them. If a
rank was stopped in time (status 75), the job is requeued. If one fails, the last lines name the rank that failed first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cluster_ddp.agent import __main__ as agent
from cluster_ddp.agent import options


def parser() -> argparse.ArgumentParser:
    """The options before the two dashes."""
    return options.parser(agent.PROGRAM, str(__doc__))


def main(argv: Sequence[str]) -> int:
    """Start the ranks, and wait for their end. Returns the exit status."""
    return agent.main(["job", *argv])
