"""`cluster-ddp train`: train the MNIST CNN under DDP. The options are the fields of `mnist.train_config.TrainConfig`.

cluster-ddp train --dataset digits --epochs 3               one process
srun python -m cluster_ddp.train                            one process per Slurm task
torchrun --nproc-per-node 2 -m cluster_ddp.train            one process per torchrun worker
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from cluster_ddp import mnist
from cluster_ddp.agent.array_values import ARRAY_TASK, configuration, fill_in
from cluster_ddp.argument_parser import Parser, add_fields, unknown
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, SpecError, exit_on_error
from cluster_ddp.mnist import data
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.runtime import console, process_exit, stop_signals
from cluster_ddp.submission.cli.options import is_sbatchs
from cluster_ddp.submission.grids import Grid

PROGRAM = "cluster-ddp train"


def parser(*, with_texts: bool = True) -> Parser:
    """The command line: an option for each field of `TrainConfig`. One that is not given is None.

    Args:
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
    """
    top = Parser(PROGRAM, usage="%(prog)s [OPTIONS]", description=__doc__)
    add_fields(top, TrainConfig, with_texts=with_texts)
    return top


def parse(options: Sequence[str], *, others: Sequence[str] = ()) -> TrainConfig:
    """Parse the options of a command line. With --help, prints a text and exits.

    Args:
        options: the words.
        others: options that may be meant as well, for the error.

    Raises:
        SpecError: there is no such option, or it has an illegal value.
    """
    if not options:
        return TrainConfig()
    program = f"{'cluster-ddp submit --help-all; for the training: ' if others else ''}{PROGRAM}"
    top = parser(with_texts="-h" in options or "--help" in options)
    try:
        parsed, rest = top.parse_known_args(options)
    except SpecError as error:
        raise SpecError(error.asked, error.found, f"{program} --help") from None
    if rest and is_sbatchs(rest[0]):
        found = "that is an option of sbatch, not of the training."
        before = f"Slurm's options go before the script: sbatch {rest[0]} … jobs/NAME.sbatch"
        asked = f"Training with {shlex.join(options)}:"
        raise SpecError(asked, found, f"{before}. The training's options: {program} --help")
    if rest:
        raise unknown(rest, [*others, *top.option_names()], f"{program} --help")
    given: dict[str, Any] = {name: value for name, value in vars(parsed).items() if value is not None}
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    return TrainConfig(**given)


def check(options: Sequence[str], grid: Grid, *, with_data: bool, others: Sequence[str] = ()) -> None:
    """Check the options of a training that is to be submitted; of an array, those of its first task.

    Args:
        options: the words. They may hold placeholders for an array task's values.
        grid: those values.
        with_data: check that the data is there, too. The training checks its content.
        others: as for `parse`.

    Raises:
        SpecError: as `parse`.
        DataError: the data is missing.
    """
    values = {ARRAY_TASK: "0", **(configuration(grid, 0) if grid else {})}
    config = parse([fill_in(word, values) for word in options], others=others)
    if with_data and config.dataset != "digits":
        data.check(config.data_dir, dataset=config.dataset, check_content=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and train. Returns the exit status."""
    with exit_on_error(PROGRAM):
        try:
            config = parse(sys.argv[1:] if argv is None else argv)
        except SpecError:  # all ranks have it
            if console.first_rank_has_said_it(os.environ):
                return USAGE_EXIT_STATUS
            raise
        stop_signals.note_early(config.stop_signals)
    try:
        mnist.train(config)
    except ClusterDDPError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # with rank and host, once
        return USAGE_EXIT_STATUS
    return 0


if __name__ == "__main__":
    process_exit.after(lambda: sys.exit(main()))
