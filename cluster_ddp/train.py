"""`cluster-ddp train`: train the MNIST CNN under DDP. The options are the fields of `mnist.config.TrainConfig`.

cluster-ddp train --dataset digits --epochs 3               one process
srun python -m cluster_ddp.train                            one process per Slurm task
torchrun --nproc-per-node 2 -m cluster_ddp.train            one process per torchrun worker
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from cluster_ddp import mnist
from cluster_ddp.errors import USAGE_EXIT_STATUS, ClusterDDPError, SpecError, exit_on_error
from cluster_ddp.launch import grids
from cluster_ddp.launch.cli import sbatch_hints
from cluster_ddp.launch.cli.options import field_texts
from cluster_ddp.launch.cli.parser import nearest_option
from cluster_ddp.launch.spec import ARRAY_TASK
from cluster_ddp.mnist.config import TrainConfig
from cluster_ddp.mnist.result import TrainResult
from cluster_ddp.runtime import stop_signals
from cluster_ddp.runtime.fork import rank_exit

PROGRAM = "cluster-ddp train"


def parser() -> argparse.ArgumentParser:
    """The names and choices of the command line, for what completes it; `parse` reads it."""
    top, texts = argparse.ArgumentParser(prog=PROGRAM), field_texts(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        name, kind = "--" + field.name.replace("_", "-"), typing.get_type_hints(TrainConfig)[field.name]
        text = texts[field.name].replace("%", "%%")
        if kind is bool:
            top.add_argument(name, action=argparse.BooleanOptionalAction, help=text)
        else:
            literal = next((one for one in (kind, *get_args(kind)) if get_origin(one) is Literal), None)
            metavar = "PATH" if Path in (kind, *get_args(kind)) else None
            top.add_argument(name, choices=get_args(literal) or None, metavar=metavar, help=text)
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
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(TrainConfig, prog=PROGRAM, args=options)
    except SystemExit as end:
        if not end.code:
            raise  # --help
        raise _error(options, said.getvalue(), others) from None


def _error(options: Sequence[str], said: str, others: Sequence[str]) -> SpecError:
    """An error of tyro's, which draws boxes, in our form."""
    legal = [*others] + ["--" + field.name.replace("_", "-") for field in dataclasses.fields(TrainConfig)]
    _, *lines = [line.strip("│ ") for line in said.splitlines()]  # below the title
    text = "\n".join(lines).strip("\n─-╰╯╭╮")
    first = re.split(r"\n(?:[─-]+)?\n|\n[─-]+$", text)[0]
    hint = f"{'cluster-ddp submit --help; for the training: ' if others else ''}{PROGRAM} --help"
    found = " ".join(first.split())
    if match := re.match(r"Unrecognized options: (\S+?)(,|$)", found):
        option = match[1]
        found = f"there is no such option.{nearest_option(option.partition('=')[0], legal)}"
        if sbatch_hints.is_one(option):
            found = "that is an option of sbatch, not of the training."
            before = f"Slurm's options go before the script: sbatch {option} … jobs/NAME.sbatch"
            hint = f"{before}. The training's options: {hint}"
    elif match := re.match(r"Error parsing (\S+): no type matching (\S+) could be instantiated from (.*)\.", found):
        kind = {"INT": "a whole number", "FLOAT": "a number"}.get(match[2].rpartition("|")[2], match[2])
        found = f"{match[1]} is {kind}, not {match[3].strip('[]')}."
    elif match := re.match(r"invalid choice (\S+) for argument '(\S+)'. Expected one of \((.*)\)", found):
        choices = " or ".join(re.findall(r"'(.*?)'", match[3]))
        found = f"{match[2]} is {choices}, not {match[1]}."
    return SpecError(f"Training with {shlex.join(options)}:", found, hint)


@dataclass(frozen=True, slots=True)
class Train:
    """The training as a function to submit."""

    options: tuple[str, ...]
    """Options of the training. They may hold placeholders for an array task's values."""

    def __call__(self, **values: str) -> TrainResult:
        """Call `mnist.train` with the options, `values` in their placeholders. Raises what `mnist.train` raises."""
        config = self.config({ARRAY_TASK: os.environ.get("SLURM_ARRAY_TASK_ID", ""), **values})
        stop_signals.note_early(config.stop_signals)
        return mnist.train(config)

    def config(self, values: Mapping[str, str], *, others: Sequence[str] = ()) -> TrainConfig:
        """Parse the options, with these values in their placeholders. Arguments and errors are those of `parse`."""
        return parse([grids.fill_in(word, values) for word in self.options], others=others)

    def __repr__(self) -> str:
        return f"cluster_ddp.mnist.train({shlex.join(self.options)})"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options and train. Returns the exit status."""
    with exit_on_error(PROGRAM):
        config = parse(sys.argv[1:] if argv is None else argv)
        stop_signals.note_early(config.stop_signals)
    try:
        mnist.train(config)
    except ClusterDDPError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # with rank and host, once
        return USAGE_EXIT_STATUS
    return 0


if __name__ == "__main__":
    rank_exit.after(lambda: sys.exit(main()))
