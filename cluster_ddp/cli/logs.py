"""`cluster-ddp logs JOB`: what a job has printed: rank 0 and its batch script, another rank, or all tasks.

JOB is a job id (12, or 12_3 for an array task) or a run directory; without JOB, the newest run. What failed first comes
last.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser, jobs_parser
from cluster_ddp.errors import JobError, exit_on_error, printable
from cluster_ddp.jobs import find_runs, run_record, run_state, watch
from cluster_ddp.jobs.find_runs import of_run
from cluster_ddp.jobs.logs import PLAIN, LogReader
from cluster_ddp.jobs.run_record import RunRecord
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.run.names import ASIDE, File
from cluster_ddp.submission.job import Job

PROGRAM = "cluster-ddp logs"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    top.add_argument("job", nargs="?", metavar="JOB", help="job id or run directory (default: the newest run)")
    top.add_argument("-f", "--follow", action="store_true", help="follow the job to its end, and exit with its status")
    raw = "print the logs as they are: colours, and whatever else they do to a terminal"
    top.add_argument("--raw", action="store_true", help=raw)
    which = top.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="the log of rank N only")
    which.add_argument("--all", action="store_true", help="the logs of all tasks")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, find the job, print its logs. Returns the exit status: with -f, the job's."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        if (elsewhere := run_there("logs", argv)) is not None:
            return elsewhere
        words = [arguments.job] if arguments.job else []
        (word,) = find_runs.named_or_newest(words, "Reading the logs of a job:", arguments.runs_dir)
        job = of_run(_record(word, arguments.runs_dir), to_read=not arguments.follow)
        names, fit = _names(job, arguments), str if arguments.raw else printable_line
        if arguments.follow:
            if_left = f"job {job.id} continues. To end it: cluster-ddp cancel {job.id}"
            return watch.on_terminal([job], if_left=if_left, names=names, fit=fit)
        reader = LogReader(lambda line: print(fit(line)), job, names)
        if not reader.files():
            found = "it has printed nothing so far."
            raise JobError(f"The logs of job {job.id}:", found, f"cluster-ddp status {shlex.quote(str(job.run_dir))}")
        reader.show_new(to_the_end=True)
        if not any(path.stat().st_size for path in reader.files()):
            who = f"Rank {arguments.rank}" if arguments.rank is not None else f"Job {job.id}"
            print(f"{who} has printed nothing so far.", file=sys.stderr)
    return 0


def printable_line(line: str) -> str:
    """Return a line of a log without what could change the terminal: colours are removed, tabs stay."""
    return "\t".join(map(printable, _COLOUR.sub("", line).split("\t")))


def _record(word: str, runs_dir: Path) -> RunRecord:
    """The run that a word means."""
    found = find_runs.find(word, runs_dir)
    if not found and (resumed := find_runs.resumed(word, runs_dir)) is not None:
        own = resumed.run_dir / ASIDE.format(word)
        print(printable(f"Job {word} was resumed as job {resumed.job}. Its own logs: {own}"), file=sys.stderr)
        found = [resumed]
    return find_runs.only(found, f"The logs of job {word}:", runs_dir, PROGRAM)


def _names(job: Job, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Names of the logs that were asked for; empty for all."""
    rank = arguments.rank
    if rank is None:
        return () if arguments.all else tuple(dict.fromkeys((*PLAIN, *_failed_first(job))))
    if not 0 <= rank < job.ranks:
        found = f"its ranks are 0 to {job.ranks - 1}."
        raise JobError(f"The log of rank {rank} of job {job.id}:", found, f"--rank {job.ranks - 1}, or --all")
    return (File.TASK_LOG.format(rank),)


def _failed_first(job: Job) -> Iterator[str]:
    """The log of the rank that failed first in the last start, if each rank has its own.

    A batch script of one's own has no log in the run directory that ends with its error.
    """
    label = run_record.read(job.run_dir).job
    ended, ranks = run_state.last_outcome(job.run_dir, label), run_state.last_size(job.run_dir).get("ranks")
    if ended is not None and ended.first is not None and ended.first.rank in range(job.ranks) and ranks == job.ranks:
        yield File.TASK_LOG.format(ended.first.rank)
