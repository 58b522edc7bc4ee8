"""`cluster-ddp status [JOB …]`: state and progress of submitted jobs, in one table.

JOB is a job id (12, 12_3; an array's id means its tasks) or a run directory. Without JOB, all jobs in runs/ are shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.errors import exit_on_error, printable
from cluster_ddp.jobs.status import RunStatus, run_statuses
from cluster_ddp.launch.run_dirs import resume_command
from cluster_ddp.slurm.job_status import FINAL_STATES

PROGRAM = "cluster-ddp status"
# Longer cells, such as a long job name, are cut.
_WIDEST = 120
_HEADINGS = ("JOB", "NAME", "STATE", "ELAPSED", "RESTARTS", "EPOCH", "LOSS", "ACCURACY", "SAMPLES/S", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, look up the jobs, print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="job ids or run directories (default: all)")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="folder of the run directories (default: runs)"
    )
    arguments = parser.parse_args(argv)
    with exit_on_error(PROGRAM):
        found = run_statuses(arguments.runs_dir, arguments.jobs)
    if not found:
        print(f"No submitted jobs in {arguments.runs_dir}. Submit one: cluster-ddp submit")
        return 0
    rows = [_HEADINGS, *(tuple(printable(cell)[:_WIDEST] for cell in _row(one)) for one in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    failed = [one for one in found if one.run_dir and one.state in {*FINAL_STATES, "unknown"} - {"COMPLETED"}]
    if failed:
        others = " (the others likewise)" if len(failed) > 1 else ""
        print(f"To resume job {failed[-1].job}{others}: {resume_command(failed[-1].run_dir or Path())}")
    return 0


def _row(one: RunStatus) -> tuple[str, ...]:
    return (
        one.job,
        one.name,
        one.state,
        one.elapsed or "-",
        "-" if one.restarts is None else str(one.restarts),
        "-" if one.epoch is None else str(one.epoch),
        "-" if one.loss is None else f"{one.loss:.4g}",
        "-" if one.accuracy is None else f"{100 * one.accuracy:.2f} %",
        "-" if one.samples_per_s is None else f"{one.samples_per_s:.0f}",
        f"({one.reason})" if one.reason else "",
    )


if __name__ == "__main__":
    sys.exit(main())
