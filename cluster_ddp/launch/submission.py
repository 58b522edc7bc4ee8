"""From a job as data to a job that is submitted: `plan` renders it and does nothing else, `submit` does the rest."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.launch import grids, run_folder, snapshot, task
from cluster_ddp.launch.job import Job
from cluster_ddp.launch.render import render, render_local, task_command
from cluster_ddp.launch.run_folder import JOB_LOG
from cluster_ddp.launch.schedulers import Held
from cluster_ddp.launch.schedulers.local import ThisMachine
from cluster_ddp.launch.schedulers.slurm import WAIT, Slurm
from cluster_ddp.launch.spec import ARRAY_TASK, JobSpec, seconds

Backend = Literal["submitit", "sbatch", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A submission that is ready to be made."""

    spec: JobSpec
    """The job."""
    function: Callable[..., Any] | None
    """What to call in each task, with an array task's values as keywords; None where the spec's command runs."""
    backend: Backend
    """How it is submitted."""
    scheduler: Slurm | ThisMachine
    """Who runs it."""
    runs_dir: Path
    """Where the run folders are, absolute."""
    take_snapshot: bool
    """Whether the code is copied into the run folder."""
    script: str
    """What bash runs."""

    @property
    def options(self) -> list[str]:
        """sbatch's options besides those in the script."""
        folder = run_folder.prefix(self.runs_dir, self.spec) + ("%A_%a" if self.spec.array else "%j")
        return [f"--output={folder}/{JOB_LOG}"]

    def __str__(self) -> str:
        """All of it, as --dry-run shows it."""
        if isinstance(self.scheduler, ThisMachine):
            return f"$ bash job.sh {run_folder.prefix(self.runs_dir, self.spec)}<process id>\n\n{self.script}"
        start = f"scontrol update JobId=<id> StartTime={self.spec.begin or 'now'}   # its run folder is there now"
        return f"$ sbatch --parsable {WAIT} {shlex.join(self.options)} <job.sbatch\n$ {start}\n\n{self.script}"


def plan(
    spec: JobSpec,
    *,
    function: Callable[..., Any] | None = None,
    backend: str = "submitit",
    runs_dir: Path = Path("runs"),
    take_snapshot: bool = False,
    source: str = "Submitted by cluster_ddp.submit from Python.",
    must_run: bool = True,
) -> Plan:
    """What would be submitted. Changes nothing.

    Args:
        spec: the job.
        function: what to call in each task instead of the spec's command.
        backend: submitit, sbatch or local.
        runs_dir: folder of the run folders.
        take_snapshot: whether the job runs a copy of the code, as it is now.
        source: what asked for it, for the script's header.
        must_run: False for a look only: a job for Slurm is then shown where there is none, too.

    Raises:
        SpecError: nothing to run, or a request that the backend can't meet; it says which can.
        RunDirError: a snapshot of a folder that is no git checkout.
    """
    if backend not in get_args(Backend):
        legal = ", ".join(get_args(Backend))
        raise SpecError(
            f"The backend {backend!r}:",
            f"there are {legal}.{nearest(backend, get_args(Backend))}",
            "--backend submitit",
        )
    if function is None and not spec.command:
        raise SpecError("Submitting a job without a command:", "there is nothing to run.", "give a command after --")
    if function is not None and backend == "sbatch":
        found = "sbatch runs commands; a function must be pickled, which submitit does."
        raise SpecError("Submitting a function with the backend sbatch:", found, 'backend="submitit", or "local"')
    spec = _with_environment(spec)
    scheduler = _scheduler(spec, backend, must_run)
    runs_dir = runs_dir.expanduser().absolute()
    prefix = run_folder.prefix(runs_dir, spec)
    code = snapshot.subfolder(Path.cwd()) if take_snapshot else None
    source += "\nEach task runs: " + (shlex.join(spec.command) if function is None else repr(function))
    if isinstance(scheduler, ThisMachine):
        runner = task.module("cluster_ddp.launch.supervisor")
        script = render_local(spec, source=source, runner=runner, code=code)
    else:
        pickled = None if backend == "sbatch" else task.runner(f"{prefix}%j")
        if pickled and spec.requeue and spec.signal is None and not 0 < _limit_s(spec) <= 2 * task.WARNING_S:
            spec = dataclasses.replace(spec, signal=f"{task.warning_signal()}@{task.WARNING_S}")
        script = render(spec, source=source, run_prefix=prefix, runner=pickled, code=code)
    return Plan(
        spec=spec,
        function=function,
        backend=backend,  # type: ignore[arg-type]  # checked above
        scheduler=scheduler,
        runs_dir=runs_dir,
        take_snapshot=take_snapshot,
        script=script,
    )


def submit(plan: Plan) -> list[Job]:
    """Submit what was planned: all of it or nothing.

    The job first waits, so that its run folder is there, under the job's id, before anything of it starts.

    Returns:
        The job; of an array its tasks, in the order of their numbers.

    Raises:
        RunDirError: the run folders can't be written; nothing is submitted then.
        SlurmError: Slurm refused, in its words; nothing is left behind then.
    """
    made = run_folder.prepare(plan.runs_dir)
    folders: list[Path] = []
    held = None
    try:
        held = plan.scheduler.hold(plan.script, plan.options)
        jobs = _make_folders(plan, held, folders)
        plan.scheduler.release(held, jobs[0].run_dir, plan.spec.begin or "now")
    except BaseException:  # an interruption, too
        run_folder.remove(folders, made)
        if held is not None:
            plan.scheduler.abandon(held)
        raise
    run_folder.point_latest(folders[0])
    return jobs


def _with_environment(spec: JobSpec) -> JobSpec:
    """With absolute paths; where no environment is named, with the virtual one that submits: it need not be active."""
    spec = dataclasses.replace(spec, venv=_absolute(spec.venv), container=_absolute(spec.container))
    named = spec.venv or spec.conda_env or spec.container or spec.container_image
    if named or sys.prefix == sys.base_prefix or not Path(sys.prefix, "bin", "activate").is_file():
        return spec
    return dataclasses.replace(spec, venv=sys.prefix)


def _limit_s(spec: JobSpec) -> int:
    """The time limit; 0 where there is none, or none is known."""
    return (seconds(spec.time) if spec.time is not None else None) or 0


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _scheduler(spec: JobSpec, backend: str, must_run: bool) -> Slurm | ThisMachine:
    has_slurm = shutil.which("sbatch") is not None
    found = _not_on_this_machine(spec)
    if backend == "sbatch" or (backend == "submitit" and (has_slurm or (found and not must_run))):
        if backend == "submitit" and spec.container_image is not None:
            words = "Pyxis puts the whole task into the container, where submitit and this environment are not."
            raise SpecError("A Pyxis container with the backend submitit:", words, "--backend sbatch")
        return Slurm()
    if found:
        asked = f"Running this job on this machine (backend {backend}{'' if has_slurm else ', no sbatch on the PATH'}):"
        raise SpecError(asked, found, "submit it where Slurm is, with --backend submitit or sbatch")
    return ThisMachine()


def _not_on_this_machine(spec: JobSpec) -> str:
    """Why only Slurm can run the job; empty if this machine can, too."""
    if spec.nodes > 1:
        possible = f"--nodes 1 --gpus-per-node {spec.gpus_per_node}"
        return f"it asks for {spec.nodes} nodes, and this is one; {possible} can be met."
    for name, what in (
        ("array", "arrays"),
        ("after", "waiting for other jobs"),
        ("begin", "waiting"),
        ("container_image", "Pyxis"),
    ):
        if getattr(spec, name) is not None:
            return f"it sets {name}={getattr(spec, name)!r}, and {what} is Slurm's."
    return ""


def _make_folders(plan: Plan, held: Held, folders: list[Path]) -> list[Job]:
    """Make and fill the run folders; each is noted in `folders` before it is made."""
    spec, prefix = plan.spec, run_folder.prefix(plan.runs_dir, plan.spec)
    main = Path(prefix + held.label)
    script = {plan.scheduler.script_name: plan.script.encode()}
    if spec.array is None:
        _make_folder(plan, held, held.label, {}, script, folders)
    else:
        _make_folder(plan, held, held.label, None, script, folders)
        for number in grids.tasks(spec.array):
            values = grids.configuration(spec.grid, number) if spec.grid else {}
            _make_folder(plan, held, f"{held.label}_{number}", {**values, ARRAY_TASK: str(number)}, {}, folders)
    if plan.take_snapshot:
        snapshot.take(Path.cwd(), main)
    return [
        Job(
            id=folder.name.removeprefix(f"{spec.name}-"),
            run_dir=folder,
            tasks=spec.nodes * (1 if spec.launcher == "torchrun" else spec.gpus_per_node),
            cluster=held.cluster,
            is_function=plan.function is not None,
            scheduler=plan.scheduler,
        )
        for folder in (folders if spec.array is None else folders[1:])
    ]


def _make_folder(
    plan: Plan,
    held: Held,
    label: str,
    values: dict[str, str] | None,
    files: dict[str, bytes],
    folders: list[Path],
) -> None:
    """One run folder: of a job, of an array's task with its `values`, or (None) of a whole array."""
    command = tuple(grids.fill_in(word, values or {}) for word in plan.spec.command) if plan.function is None else ()
    described = run_folder.description(
        plan.spec,
        label=label,
        backend=plan.backend,
        cluster=held.cluster,
        command=command,
        values={key: value for key, value in (values or {}).items() if key != ARRAY_TASK},
    )
    files = {run_folder.SPEC_FILE: described, **files}
    if values is not None and plan.backend != "sbatch":
        if plan.function is None:
            work: Callable[[], Any] = task.Command(task_command(plan.spec, command))
        else:
            work = functools.partial(plan.function, **{key: values[key] for key in plan.spec.grid})
        limit_min = -(-_limit_s(plan.spec) // 60)
        requeue = plan.spec.requeue is True
        files[task.pickle_name(label)] = task.pickled(work, time_limit_min=limit_min, requeue=requeue)
    path = plan.runs_dir / f"{plan.spec.name}-{label}"
    if not path.exists():
        folders.append(path)
    run_folder.create(path, files)
