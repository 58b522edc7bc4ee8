"""`cluster-ddp status [JOB …]`: state and progress of jobs and trainings, in one table.

JOB is a job id (12, 12_3; an array's id means its tasks) or a run directory. Without JOB, all runs in runs/ are shown;
with --watch, the newest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser, jobs_parser
from cluster_ddp.errors import aligned, counted, exit_on_error, printable
from cluster_ddp.jobs import find_runs
from cluster_ddp.jobs.report import cost
from cluster_ddp.jobs.status import RunStatus, run_statuses
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.run.names import ENDS
from cluster_ddp.slurm import reasons
from cluster_ddp.slurm.job_status import FINAL_STATES
from cluster_ddp.submission import run_dirs

PROGRAM = "cluster-ddp status"
# Longer cells, such as a long job name, are cut; so is the note at the end.
_WIDEST, _LONGEST_NOTE = 120, 300
_HEADINGS = (
    *("JOB", "NAME", "STATE", "ELAPSED", "RESTARTS", "REQUEUES"),
    *("EPOCH", "LOSS", "ACCURACY", "SAMPLES/S", "VALUES", ""),
)
_STATE = _HEADINGS.index("STATE")
_ENDED = {*FINAL_STATES, *ENDS, "unknown"}
_FAILED = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
_COLOURS = {"COMPLETED": 32, "RUNNING": 36, "COMPLETING": 36, "PENDING": 33, "CONFIGURING": 33, "STOPPED": 33}
_RED = 31
_WATCH_S = 10.0


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    top.add_argument("jobs", nargs="*", metavar="JOB", help="job ids or run directories (default: all)")
    form = top.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    watch = f"show the table every {_WATCH_S:g} s until all jobs, or else the newest one, have ended"
    form.add_argument("--watch", action="store_true", help=watch)
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, look up the jobs, print the table. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        if (elsewhere := run_there("status", argv)) is not None:
            return elsewhere
        if arguments.watch:
            return _watch(arguments)
        found = run_statuses(arguments.runs_dir, arguments.jobs)
        if arguments.json:
            costs = (dataclasses.asdict(cost.read(one)) for one in found)
            objects = [dataclasses.asdict(one) | {"cost": of_one} for one, of_one in zip(found, costs)]
            print(json.dumps(objects, default=str, indent=2))
        else:
            _show(found, arguments.runs_dir)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Show the table again and again: in the same place on a terminal, below each other in a file."""
    words = find_runs.named_or_newest(arguments.jobs, "Watching a job:", arguments.runs_dir)
    try:
        while True:
            found = run_statuses(arguments.runs_dir, words)
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            _show(found, arguments.runs_dir)
            sys.stdout.flush()
            if all(one.state in _ENDED for one in found):
                return 0
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        return 130


def _show(found: list[RunStatus], runs_dir: Path) -> None:
    if not found:
        print(
            f"No runs in {runs_dir}. Submit one: cluster-ddp submit\n"
            "(A job of cluster-ddp launch has a run directory if its script uses cluster_ddp, or with --run-dir.)"
        )
        return
    rows = [_HEADINGS, *(_row(one) for one in found)]
    shown = [i for i, heading in enumerate(_HEADINGS) if heading != "VALUES" or any(one.values for one in found)]
    table = aligned([[row[i] for i in shown] for row in rows])
    for cells, state in zip(table, ["", *(one.state for one in found)]):
        cells[_STATE] = _coloured(state, cells[_STATE])
        print("  ".join(cells).rstrip())
    for one in found:
        if one.earlier:
            print(printable(f"Job {one.earlier} was resumed as job {one.job}."))
        if one.failure and one.state in _FAILED:
            print(printable(f"Job {one.job or one.name}: failed first: {one.failure}"))
        if one.end:
            print(printable(f"Job {one.job}: {one.end}."))
        if one.run_dir is None:
            print(f"Job {one.job} has no run directory: its own log says more. launch --run-dir PATH makes one.")
        if one.full_disk:
            print(printable(f"{f'Job {one.job}' if one.job else one.name}: {one.full_disk}"))
    failed = [one for one in found if one.is_submitted and one.state in _ENDED - {"COMPLETED"}]
    resumable = {
        one.run_dir: f"job {one.job}" if one.job else one.name
        for one in failed
        if one.run_dir and run_dirs.has_results(one.run_dir)
    }
    if resumable:
        others = " (the others likewise)" if len(resumable) > 1 else ""
        run_dir, what = list(resumable.items())[-1]
        print(printable(f"To resume {what}{others}: {run_dirs.resume_command(run_dir)}"))


def _coloured(state: str, text: str) -> str:
    """A text in the colour of a job's state, if stdout is a terminal and NO_COLOR is not set.

    https://no-color.org: any value of NO_COLOR but the empty one counts.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty():
        return text
    return text if state in ("", "unknown") else f"\x1b[{_COLOURS.get(state, _RED)}m{text}\x1b[0m"


def _row(one: RunStatus) -> tuple[str, ...]:
    cells = (
        one.job or "-",
        one.name,
        one.state,
        one.elapsed or "-",
        "-" if one.restarts is None else str(one.restarts),
        "-" if one.requeues is None else str(one.requeues),
        "-" if one.epoch is None else str(one.epoch),
        "-" if one.loss is None else f"{one.loss:.4g}",
        "-" if one.accuracy is None else f"{100 * one.accuracy:.2f} %",
        "-" if one.samples_per_s is None else f"{one.samples_per_s:.0f}",
        " ".join(f"{key}={value}" for key, value in one.values.items()),
    )
    return (*(printable(cell)[:_WIDEST] for cell in cells), printable(_note(one))[:_LONGEST_NOTE])


def _note(one: RunStatus) -> str:
    """How many nodes it has, if it takes what is free; and `_remark`."""
    size = "" if one.nodes is None or one.node_range is None else f"{counted(one.nodes, 'node')} ({one.node_range})"
    return " ".join(filter(None, (size, _remark(one))))


def _remark(one: RunStatus) -> str:
    """What is wrong with it or its weights; why it waits; for a training that logs no figures, how far it is."""
    if one.problem:
        return f"({one.problem.rstrip('.')})"
    if one.reason:
        return f"({reasons.of_waiting(one.reason)})"
    if one.non_finite_step is not None:
        last = "" if one.saved_step is None else f"; last good checkpoint: step {one.saved_step}"
        return f"(warning: weights are NaN or Inf since step {one.non_finite_step}{last})"
    return f"(newest checkpoint: step {one.saved_step})" if one.saved_step is not None and one.epoch is None else ""
