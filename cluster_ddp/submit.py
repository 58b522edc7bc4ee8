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
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp import submit_api
from cluster_ddp.agent.array_values import ARRAY_TASK, configuration
from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.jobs import watch
from cluster_ddp.remote.remote_verbs import run_there
from cluster_ddp.submission import submit_plan
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.cli import options as submit_options
from cluster_ddp.submission.cli import submit_command
from cluster_ddp.submission.grids import Grid
from cluster_ddp.submission.job import Job
from cluster_ddp.submission.planning import Plan

if TYPE_CHECKING:
    from cluster_ddp.train import Train
    from cluster_ddp.train_options import TrainConfig

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
            words, program=PROGRAM, description=str(__doc__), reference=ReferenceJob(), submit=submit
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


class ReferenceJob:
    """The reference job: the training of mnist/. Its options are checked before it is submitted."""

    name = "mnist"

    def __init__(self, others: Sequence[str] = ()) -> None:
        """`others` are options of the verb beside those of a submission, for suggestions."""
        self._others = others

    def function(self, options: list[str], grid: Grid) -> Train:
        """The training. Checks the options of the first (or only) task."""
        if options and not options[0].startswith("-"):
            words = shlex.join(options)
            started = f"python {words}" if options[0].endswith(".py") else words
            raise SpecError(
                f"Submitting {words}:", "a command comes after two dashes.", f"{PROGRAM} [OPTIONS] -- {started}"
            )
        submit_options.refuse_sbatchs(options)
        self._config(options, grid)
        return self._training(options)

    def command(self, options: Sequence[str]) -> list[str]:
        """The training, as a command for the first python on the job's PATH."""
        return ["python", "-m", "cluster_ddp.train", *options]

    def check(self, options: list[str], grid: Grid) -> None:
        """Check that the data is there. The job checks its content."""
        from cluster_ddp.mnist import idx_files

        config = self._config(options, grid)
        if config.dataset != "digits":
            idx_files.check(config.data_dir, dataset=config.dataset, check_content=False)

    def _training(self, options: list[str]) -> Train:
        from cluster_ddp.train import Train  # only the reference job needs it

        return Train(tuple(options))

    def _config(self, options: list[str], grid: Grid) -> TrainConfig:
        values = configuration(grid, 0) if grid else {}
        others = [*self._others, *submit_options.parser(PROGRAM, "", with_texts=False).option_names()]
        return self._training(options).config({ARRAY_TASK: "0", **values}, others=others)


class _Callable(types.ModuleType):
    """Makes this module callable: once imported, it hides the function `cluster_ddp.submit` of the same name."""

    __call__ = staticmethod(submit_api.submit)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
