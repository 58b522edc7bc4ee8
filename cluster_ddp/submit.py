"""`cluster-ddp submit`: submit a training script to Slurm, or run it on this machine.

--nodes 2 --gpus-per-node 4 -- python my_train.py           a command; each GPU gets a task that runs it
--nodes 2 --gpus-per-node 2 --epochs 3                      no command: the MNIST training, with its own options
--array seed=0..3 lr=0.1,1.0 -- python t.py --lr {lr} …     an array over all combinations
--dry-run … --test-only … --watch …                         show the script; ask when it would start; follow the job
--resume 12                                                 resume job 12 in its run directory

From Python, `cluster_ddp.submit(spec, function_or_command)` does the same.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.jobs.job import Job
from cluster_ddp.launch import grids, planning, submission
from cluster_ddp.launch.backends.slurm import Slurm
from cluster_ddp.launch.checks import preflight
from cluster_ddp.launch.cli import command_line, options
from cluster_ddp.launch.planning import Plan
from cluster_ddp.launch.resume import find
from cluster_ddp.launch.spec import ARRAY_TASK, JobSpec

if TYPE_CHECKING:
    from cluster_ddp.mnist.config import TrainConfig

PROGRAM = "cluster-ddp submit"


def submit(
    spec: JobSpec,
    function_or_command: Callable[..., Any] | Sequence[str] | None = None,
    *,
    backend: str = "submitit",
    runs_dir: str | os.PathLike[str] = "runs",
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    snapshot: bool = False,
    check: bool = True,
) -> Job | list[Job]:
    """Submit a job.

    Args:
        spec: what to run on what.
        function_or_command: a function, called in every rank with the `World` and, in an array, its values of the grid
            as keywords (texts); or a command, an argument each. None for the spec's own command.
        backend: submitit (Slurm if there is one, else this machine), sbatch (Slurm, commands only) or local.
        runs_dir: folder of the run directories.
        run_dir: the new run directory; default: <name>-<job id> in `runs_dir`.
        resume: a job that has ended (12, or 12_3 for an array's task), or its run directory: the new job resumes there.
        snapshot: run a copy of the code as it is now.
        check: look first whether the job can run, and ask the cluster; doubts become Python warnings.

    Returns:
        The job; for an array the list of its tasks.

    Raises:
        SpecError: it can't be asked for, or the cluster or the backend can't meet it; the job to resume has not ended.
        RunDirError: the run directory can't be written.
        SlurmError: Slurm refused, in its words. Nothing is left behind in any of these cases.
    """
    function = None
    if callable(function_or_command):
        from cluster_ddp.runtime.with_world import WithWorld

        function = WithWorld(function_or_command)
    elif function_or_command is not None:
        spec = dataclasses.replace(spec, command=options.as_words(function_or_command))
    plan = planning.plan(
        spec,
        function=function,
        backend=backend,
        runs_dir=Path(runs_dir),
        run_dir=None if run_dir is None else Path(run_dir),
        earlier=None if resume is None else find(resume, Path(runs_dir)),
        take_snapshot=snapshot,
    )
    if check:
        for advice in preflight.check(plan, ask_cluster=True):
            warnings.warn(f"{advice.text} ({advice.code})", stacklevel=2)
    jobs = _submitted(plan)
    return jobs[0] if spec.array is None else jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan, submit. Returns the exit status."""
    words, here = sys.argv[1:] if argv is None else argv, Path.cwd()  # what resumes changes to another folder

    def submit_and_follow(plan: Plan, watch: bool) -> int:
        jobs = _submitted(plan)
        print(_announcement(plan, jobs, here), flush=True)
        return _follow(plan, jobs) if watch else 0

    with exit_on_error(PROGRAM):
        return command_line.run(
            words, program=PROGRAM, description=str(__doc__), reference=_Mnist(), submit=submit_and_follow
        )


def _submitted(plan: Plan) -> list[Job]:
    return [Job(**task._asdict()) for task in submission.submit(plan)]


def _follow(plan: Plan, jobs: list[Job]) -> int:
    from cluster_ddp.jobs.watch import follow

    try:
        return follow(jobs, show=lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        label = jobs[0].id.partition("_")[0]
        cancel = "scancel" if isinstance(plan.scheduler, Slurm) else "kill"
        print(f"\nNot followed any more; job {label} continues. To end it: {cancel} {label}", file=sys.stderr)
        return 130


def _announcement(plan: Plan, jobs: list[Job], here: Path) -> str:
    spec, label, folder = plan.spec, jobs[0].id.partition("_")[0], os.path.relpath(jobs[0].run_dir, here)
    size = f"{spec.nodes} node{'s' * (spec.nodes > 1)} x {spec.gpus_per_node} GPU{'s' * (spec.gpus_per_node > 1)}"
    if spec.array is not None:
        folders = f"{folder} … {jobs[-1].run_dir.name}"
        return f"Submitted array {label} ({spec.name}): {len(jobs)} tasks, each {size}. Run directories: {folders}"
    where = "" if isinstance(plan.scheduler, Slurm) else " on this machine"
    return f"Submitted job {label} ({spec.name}){where}: {size}. Run directory: {folder}"


class _Mnist:
    """The reference job: the training of mnist/, with its options checked before it is submitted."""

    name = "mnist"

    def command(self, rest: list[str], settings: Mapping[str, Any]) -> list[str]:
        """The training, with the Python that runs here unless the job has an environment of its own."""
        if rest and not rest[0].startswith("-"):
            words = shlex.join(rest)
            raise SpecError(f"Submitting {words}:", "a command stands after two dashes.", f"… -- {words}")
        options.refuse_habits(rest)
        self._config(rest, settings)
        elsewhere = any(settings.get(key) for key in ("venv", "conda_env", "container", "container_image"))
        return ["python" if elsewhere else sys.executable, "-m", "cluster_ddp.train", *rest]

    def check(self, rest: list[str], settings: Mapping[str, Any]) -> None:
        """That the data is there; its content is checked in the job."""
        from cluster_ddp.mnist import files

        config = self._config(rest, settings)
        if config.dataset == "mnist":
            files.check(config.data_dir, check_content=False)

    def _config(self, rest: list[str], settings: Mapping[str, Any]) -> TrainConfig:
        """The options of the first, or only, task."""
        from cluster_ddp.mnist.config import TrainConfig

        if not rest:
            return TrainConfig()
        import tyro

        grid = settings.get("grid") or {}
        values = {ARRAY_TASK: "0", **(grids.configuration(grid, 0) if grid else {})}
        return tyro.cli(TrainConfig, prog=PROGRAM, args=[grids.fill_in(word, values) for word in rest])


class _Door(types.ModuleType):
    """Lets `cluster_ddp.submit(…)` work, too, once this module has been imported and bears that name."""

    __call__ = staticmethod(submit)


sys.modules[__name__].__class__ = _Door

if __name__ == "__main__":
    sys.exit(main())
