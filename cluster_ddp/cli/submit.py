"""`cluster-ddp submit`: submit a training script to Slurm, or run it on this machine.

--nodes 2 --gpus-per-node 4 -- python my_train.py           a command, run in one task per GPU
--nodes 2 --gpus-per-node 2 --epochs 3                      no command: the MNIST training and its options
--array seed=0..3 lr=0.1,1.0 -- python t.py --lr {lr} …     an array over all combinations
--dry-run … --test-only … --watch …                         print the script; ask when it would start; follow the job
--resume 12                                                 resume job 12 in its run directory

From Python, `cluster_ddp.submit(spec, function_or_command)` does the same, `cluster_ddp.submit_array` submits an array.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import exit_on_error
from cluster_ddp.jobs import watch
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.submission import submit_plan
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.cli import options as submit_options
from cluster_ddp.submission.cli import submit_command
from cluster_ddp.submission.grids import Grid
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan

PROGRAM = "cluster-ddp submit"


def parser() -> Parser:
    """The command line before the two dashes."""
    return submit_options.parser(PROGRAM, str(__doc__), with_texts=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, plan, submit. Returns the exit status."""
    words, here = sys.argv[1:] if argv is None else argv, Path.cwd()  # resuming changes to another folder
    with exit_on_error(PROGRAM):
        if (elsewhere := run_there("submit", words)) is not None:
            return elsewhere
        submit = partial(_submit, here)
        return submit_command.run(
            words, program=PROGRAM, description=str(__doc__), check_training=check_training, submit=submit
        )


def _submit(here: Path, plan: Plan, follow: bool) -> int:
    """Submit a plan from the folder `here`, and follow the job if asked. Returns the exit status."""
    jobs = submit_plan.submit(plan)
    print(_announcement(plan, jobs, here), flush=True)
    if follow:
        label = jobs[0].id.partition("_")[0]
        return watch.on_terminal(jobs, if_left=f"job {label} continues.\n{_next_steps(jobs, here)}")
    print(_next_steps(jobs, here))
    return 0


def _next_steps(jobs: list[Job], here: Path) -> str:
    """How to follow the job, and how to end it."""
    if len(jobs) == 1:
        folder = shlex.quote(os.path.relpath(jobs[0].link, here))
        return f"To follow it: cluster-ddp logs -f {folder}\nTo end it: cluster-ddp cancel {folder}"
    whole = shlex.quote(os.path.relpath(jobs[0].link.parent, here))
    return f"To follow it: cluster-ddp status --watch {whole}\nTo end it: cluster-ddp cancel {whole}"


def _announcement(plan: Plan, jobs: list[Job], here: Path) -> str:
    spec, label, folder = plan.spec, jobs[0].id.partition("_")[0], os.path.relpath(jobs[0].run_dir, here)
    if spec.array is not None:
        folders = f"{folder} … {jobs[-1].run_dir.name}"
        return f"Submitted array {label} ({spec.name}): {len(jobs)} tasks, each {spec.size}. Run directories: {folders}"
    where = "" if isinstance(plan.scheduler, Slurm) else " on this machine"
    return f"Submitted job {label} ({spec.name}){where}: {spec.size}. Run directory: {folder}"


def check_training(options: Sequence[str], grid: Grid, *, with_data: bool, others: Sequence[str] = ()) -> None:
    """Check the training that is submitted if no command is given, as `train.check`.

    `others` are options of the verb beside those of a submission, for suggestions.
    """
    from cluster_ddp import train  # only this training needs it

    names = submit_options.parser(PROGRAM, "", with_texts=False).option_names()
    train.check(options, grid, with_data=with_data, others=[*others, *names])
