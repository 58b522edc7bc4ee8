"""`cluster-ddp train`: train the MNIST CNN under DDP; the options are `mnist.config.TrainConfig`'s.

cluster-ddp train --dataset digits --epochs 3               one process
srun python -m cluster_ddp.train                            one per Slurm task
torchrun --nproc-per-node 2 -m cluster_ddp.train            one per torchrun worker
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, exit_on_error
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.runtime import stop_signals

PROGRAM = "cluster-ddp train"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and train. Returns the exit status."""
    with exit_on_error(PROGRAM):
        config = tyro.cli(TrainConfig, prog=PROGRAM, args=argv)
        stop_signals.note_early(config.stop_signals)
    from cluster_ddp.mnist.loop import run  # torch

    try:
        run(config)
    except ClusterDDPError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # with rank and host, once
        return USAGE_EXIT_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
