"""From a job as data to a plan: which scheduler, which script. Changes nothing."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cluster_ddp.errors import SpecError, nearest
from cluster_ddp.launch import python_command, run_folder, snapshot, task
from cluster_ddp.launch.render import render, render_local
from cluster_ddp.launch.run_folder import JOB_LOG
from cluster_ddp.launch.schedulers.local import ThisMachine
from cluster_ddp.launch.schedulers.slurm import WAIT, Slurm
from cluster_ddp.launch.spec import JobSpec

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
    if spec.launcher == "fork":
        _check_forkable(spec, function)
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


def _check_forkable(spec: JobSpec, function: Callable[..., Any] | None) -> None:
    if function is not None:
        found = "a function is called in tasks of its own; what forks the ranks runs Python scripts and modules."
        raise SpecError("Submitting a function with the launcher fork:", found, 'launcher="srun"')
    python_command.interpreter_words(spec.command)


def _with_environment(spec: JobSpec) -> JobSpec:
    """With absolute paths; where no environment is named, with the virtual one that submits: it need not be active."""
    spec = dataclasses.replace(spec, venv=_absolute(spec.venv), container=_absolute(spec.container))
    named = spec.venv or spec.conda_env or spec.container or spec.container_image
    if named or sys.prefix == sys.base_prefix or not Path(sys.prefix, "bin", "activate").is_file():
        return spec
    return dataclasses.replace(spec, venv=sys.prefix)


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
