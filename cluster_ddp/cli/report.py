"""`cluster-ddp report JOB`: what became of a run: state, time, how CPUs, memory and GPUs were used, and what to change.

JOB is a job id (12, or 12_3 for an array task) or a run directory; without JOB, the newest run. Of an array, it is a
table of its tasks, best first.
Of a folder of runs (`cluster-ddp report runs/ --since 2026-11-01`), it is what each has cost, and the sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.argument_parser import Parser, jobs_parser
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.jobs import find_runs, run_record
from cluster_ddp.jobs.report import array_tasks, cost, training_stats
from cluster_ddp.jobs.report.report_text import as_text, notes
from cluster_ddp.jobs.report.summary import Report, report
from cluster_ddp.jobs.status import run_statuses
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.run.files import to_json

PROGRAM = "cluster-ddp report"


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    which = "job ids or run directories; or one folder of runs (default: the newest run)"
    top.add_argument("jobs", nargs="*", metavar="JOB", help=which)
    regex = r"regular expression for what rank 0 prints: a group for each figure, such as 'loss (?P<loss>\S+)'"
    top.add_argument("--metric", metavar="REGEX", help=regex)
    since = "with one folder of runs: those submitted on this day and later, such as 2026-11-01"
    top.add_argument("--since", metavar="DAY", help=since)
    form = top.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    html = "write the reports and their curves into one page, for a browser; it needs no network"
    form.add_argument("--html", type=Path, metavar="FILE", help=html)
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, read the runs, print their reports. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        if arguments.html is not None and arguments.on:
            found_there = "the page would be written there, not here."
            hint = "fetch the runs, then report them here: cluster-ddp fetch --on HOST"
            raise SpecError(f"Writing {arguments.html} of runs on {arguments.on}:", found_there, hint)
        if (elsewhere := run_there("report", argv)) is not None:
            return elsewhere
        arguments.jobs = find_runs.named_or_newest(arguments.jobs, "Reporting a run:", arguments.runs_dir)
        if (folder := _folder(arguments)) is not None:
            runs = cost.of_folder(folder, arguments.since)
            print(to_json(cost.as_json(runs), default=str, indent=2) if arguments.json else cost.as_text(runs))
            return 0
        metric = training_stats.compiled(arguments.metric) if arguments.metric is not None else None
        statuses = run_statuses(arguments.runs_dir, arguments.jobs)
        found = [report(status, metric=metric) for status in statuses]
        if arguments.html is not None:
            from cluster_ddp.jobs.report import page

            page.write(arguments.html, found)
            print(f"Written: {arguments.html}")
        elif arguments.json:
            print(to_json([*map(_as_json, found)], default=str, indent=2))
        else:
            print("\n\n".join(_texts(found, arguments.jobs)))
    return 0


def _folder(arguments: argparse.Namespace) -> Path | None:
    """The folder of runs to add up; None if single runs are meant.

    Raises:
        SpecError: there is an option that does not fit.
    """
    words, since = arguments.jobs, arguments.since
    path = Path(words[0])
    if len(words) == 1 and path.is_dir() and not run_record.is_run(path):
        if arguments.html is None and arguments.metric is None:
            return path
        found, hint = "--html and --metric are for single runs.", "name the runs: cluster-ddp report 12 13 --html FILE"
        raise SpecError(f"Adding up the runs of {path}:", found, hint)
    if since is None:
        return None
    hint = f"cluster-ddp report runs/ --since {shlex.quote(since)}"
    raise SpecError(f"Reporting {' '.join(words)} with --since:", "--since takes one folder of runs.", hint)


def _as_json(found: Report) -> dict[str, Any]:
    failures = [failed._asdict() for failed in found.failures]
    return {**dataclasses.asdict(found), "failures": failures, "notes": notes(found)}


def _texts(found: Sequence[Report], words: Sequence[str]) -> Iterator[str]:
    """A table for each array; a report for each other run, and for each task that one of the `words` means."""
    groups: dict[object, list[Report]] = {}
    for at, one in enumerate(found):
        status, folder = one.status, one.status.run_dir
        array = (status.name, status.job.partition("_")[0], folder and folder.parent)
        groups.setdefault(array if "_" in status.job else at, []).append(one)
    named = {*words, *map(Path, words)}
    for runs in groups.values():
        alone = [one for one in runs if named & {one.status.job, one.status.run_dir}]
        if len(runs) > 1 and len(alone) < len(runs):
            yield array_tasks.as_text(runs)
        else:
            alone = runs
        yield from map(as_text, alone)
