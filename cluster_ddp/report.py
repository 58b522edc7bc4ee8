"""`cluster-ddp report JOB`: what became of a run: state, time, how CPUs, memory and GPUs were used, and what to change.

JOB is a job id (12, or 12_3 for an array task; an array's id means all its tasks) or a run directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from cluster_ddp.errors import exit_on_error
from cluster_ddp.jobs import report, terminal
from cluster_ddp.jobs.status import run_statuses
from cluster_ddp.launch.cli import add_on
from cluster_ddp.remote import verbs

PROGRAM = "cluster-ddp report"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = terminal.parser(PROGRAM, __doc__)
    add_on(top)
    top.add_argument("jobs", nargs="+", metavar="JOB", help="job ids or run directories")
    top.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, read the runs, print their reports. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(words)
    with exit_on_error(PROGRAM):
        if (elsewhere := verbs.run_there("report", words)) is not None:
            return elsewhere
        found = [report.report(status) for status in run_statuses(arguments.runs_dir, arguments.jobs)]
        if arguments.json:
            objects = [{**dataclasses.asdict(one), "notes": report.notes(one)} for one in found]
            print(json.dumps(objects, default=str, indent=2))
        else:
            print("\n\n".join(map(report.as_text, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
