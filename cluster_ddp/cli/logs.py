"""`cluster-ddp logs JOB`: what a job has printed: rank 0 and its batch script, another rank, or all tasks.

JOB is a job id (12, or 12_3 for an array task) or a run directory. What failed first comes last.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster_ddp.errors import JobError, exit_on_error, printable
from cluster_ddp.jobs import logs, lookup, run_records, terminal
from cluster_ddp.jobs.logs import LogReader
from cluster_ddp.jobs.lookup import of_run, printed_by
from cluster_ddp.jobs.run_records import RunRecord
from cluster_ddp.jobs.terminal import BottomLine
from cluster_ddp.jobs.watch import follow
from cluster_ddp.protocol import ASIDE
from cluster_ddp.remote import verbs
from cluster_ddp.submission.cli import add_on
from cluster_ddp.submission.cli.parser import Parser
from cluster_ddp.submission.job import Job

PROGRAM = "cluster-ddp logs"


def parser() -> Parser:
    """The command line."""
    top = terminal.parser(PROGRAM, __doc__)
    add_on(top)
    top.add_argument("job", metavar="JOB", help="job id or run directory")
    top.add_argument("-f", "--follow", action="store_true", help="follow the job to its end, and exit with its status")
    raw = "print the logs as they are: colours, and whatever else they do to a terminal"
    top.add_argument("--raw", action="store_true", help=raw)
    which = top.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="the log of rank N only")
    which.add_argument("--all", action="store_true", help="the logs of all tasks")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, find the job, print its logs. Returns the exit status: with -f, the job's."""
    words = sys.argv[1:] if argv is None else argv
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(words)
        if (elsewhere := verbs.run_there("logs", words)) is not None:
            return elsewhere
        record = _record(arguments.job, arguments.runs_dir)
        job = of_run(record) if arguments.follow else printed_by(record)
        names = _names(job, arguments)
        plain = names if arguments.rank is not None else logs.PLAIN
        if arguments.follow:
            return _follow(job, names, plain, _shown(arguments))
        if not _existing(job, names):
            found = "it has printed nothing so far."
            raise JobError(f"The logs of job {job.id}:", found, f"cluster-ddp status {shlex.quote(str(job.run_dir))}")
        shown = _shown(arguments)
        reader = LogReader(lambda line: print(shown(line)), lambda: _existing(job, names), plain=plain)
        reader.show_new(to_the_end=True)
        if not any(path.stat().st_size for path in _existing(job, names)):
            who = f"Rank {arguments.rank}" if arguments.rank is not None else f"Job {job.id}"
            print(f"{who} has printed nothing so far.", file=sys.stderr)
    return 0


def _shown(arguments: argparse.Namespace) -> Callable[[str], str]:
    """What makes a line of a log fit for a terminal."""
    return str if arguments.raw else terminal.printable_line


def _record(word: str, runs_dir: Path) -> RunRecord:
    """The run that a word means."""
    found = lookup.find(word, runs_dir)
    if not found and (resumed := run_records.resumed(word, runs_dir)) is not None:
        own = resumed.run_dir / ASIDE.format(word)
        print(printable(f"Job {word} was resumed as job {resumed.job}. Its own logs: {own}"), file=sys.stderr)
        found = [resumed]
    if not found:
        hint = "give a job id or a run directory; look in another folder with --runs-dir PATH"
        raise JobError(f"The logs of job {word}:", f"no run directory found in {runs_dir}.", hint)
    if len(found) > 1:
        tasks = f"it is an array with {len(found)} tasks, {found[0].job} to {found[-1].job}."
        raise JobError(f"The logs of job {word}:", tasks, f"name one: {PROGRAM} {found[0].job}")
    return found[0]


def _names(job: Job, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Names of the logs that were asked for; empty for all."""
    if arguments.all:
        return ()
    if arguments.rank is None:
        return logs.PLAIN
    name, ranks = logs.of_rank(job, arguments.rank)
    if len(ranks) > 1:
        print(f"torchrun writes one log for a node: {name} is of ranks {ranks[0]} to {ranks[-1]}.", file=sys.stderr)
    return (name,)


def _existing(job: Job, names: Sequence[str]) -> list[Path]:
    return [path for path in job.log_files() if not names or path.name in names]


def _follow(job: Job, names: Sequence[str], plain: Sequence[str], shown: Callable[[str], str]) -> int:
    try:
        with BottomLine() as bottom:
            reader = LogReader(lambda line: bottom.show(shown(line)), lambda: _existing(job, names), plain=plain)
            return follow([job], show=bottom.show, show_figures=bottom.update, logs=reader)
    except KeyboardInterrupt:
        print(f"\nNo longer following; job {job.id} continues. To end it: cluster-ddp cancel {job.id}", file=sys.stderr)
        return 130
