"""`cluster-ddp report JOB`: what became of a run: state, time, how CPUs, memory and GPUs were used, and what to change.

JOB is a job id (12, or 12_3 for an array task; an array's id means all its tasks) or a run directory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.cli import jobs_parser
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.files import to_json
from cluster_ddp.jobs.report import training_figures
from cluster_ddp.jobs.report.report_text import as_text, notes
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import run_statuses
from cluster_ddp.remote import verbs

PROGRAM = "cluster-ddp report"


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    top.add_argument("jobs", nargs="+", metavar="JOB", help="job ids or run directories")
    regex = r"regular expression for what rank 0 prints: a group for each figure, such as 'loss (?P<loss>\S+)'"
    top.add_argument("--metric", metavar="REGEX", help=regex)
    form = top.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    html = "write the reports and their curves into one page, for a browser; it needs no network"
    form.add_argument("--html", type=Path, metavar="FILE", help=html)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, read the runs, print their reports. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(words)
        if arguments.html is not None and arguments.on:
            found_there = "the page would be written there, not here."
            hint = "fetch the runs, then report them here: cluster-ddp fetch --on HOST"
            raise SpecError(f"Writing {arguments.html} of runs on {arguments.on}:", found_there, hint)
        if (elsewhere := verbs.run_there("report", words)) is not None:
            return elsewhere
        metric = training_figures.compiled(arguments.metric) if arguments.metric is not None else None
        statuses = run_statuses(arguments.runs_dir, arguments.jobs)
        found = [report(status, metric=metric) for status in statuses]
        if arguments.html is not None:
            from cluster_ddp.jobs.report import page

            page.write(arguments.html, found)
            print(f"Written: {arguments.html}")
        elif arguments.json:
            objects = [{**dataclasses.asdict(one), "notes": notes(one)} for one in found]
            print(to_json(objects, default=str, indent=2))
        else:
            print("\n\n".join(map(as_text, found)))
    return 0
