"""From a job as data to a plan: which scheduler, which script. Changes nothing."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cluster_ddp.contract import File
from cluster_ddp.errors import RunDirError, SpecError, nearest
from cluster_ddp.launch import grids, parse_python_command, run_dirs, snapshot
from cluster_ddp.launch.backends import submitit_task
from cluster_ddp.launch.backends.local import ThisMachine
from cluster_ddp.launch.backends.slurm import WAIT, Slurm
from cluster_ddp.launch.render import render, render_local
from cluster_ddp.launch.resume import Earlier
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
    """Where the run directories are, absolute."""
    run_dir: Path | None
    """The run directory, where it was chosen, absolute; else one in `runs_dir`, under the job's id."""
    earlier: Earlier | None
    """The run that is resumed, in that run directory."""
    code: str | None
    """The working folder in the snapshot, relative to the run directory (of an array: of the whole)."""
    take_snapshot: bool
    """Whether the code is copied into the run directory."""
    script: str
    """What bash runs."""

    @property
    def options(self) -> list[str]:
        """sbatch's options besides those in the script."""
        folder = self.run_dir or run_dirs.prefix(self.runs_dir, self.spec) + ("%A_%a" if self.spec.array else "%j")
        return [f"--output={folder}/{File.JOB_LOG}"]

    def __str__(self) -> str:
        """All of it, as --dry-run shows it."""
        if isinstance(self.scheduler, ThisMachine):
            folder = self.run_dir or f"{run_dirs.prefix(self.runs_dir, self.spec)}<process id>"
            return f"$ bash {File.LOCAL_SCRIPT} {folder}\n\n{self.script}"
        start = f"scontrol update JobId=<id> StartTime={self.spec.begin or 'now'}   # its run directory is there now"
        return f"$ sbatch --parsable {WAIT} {shlex.join(self.options)} <{File.BATCH_SCRIPT}\n$ {start}\n\n{self.script}"


def plan(
    spec: JobSpec,
    *,
    function: Callable[..., Any] | None = None,
    backend: str = "submitit",
    runs_dir: Path = Path("runs"),
    run_dir: Path | None = None,
    earlier: Earlier | None = None,
    code: str | None = None,
    take_snapshot: bool = False,
    source: str = "Submitted by cluster_ddp.submit from Python.",
    must_run: bool = True,
) -> Plan:
    """What would be submitted. Changes nothing.

    Args:
        spec: the job.
        function: what to call in each task instead of the spec's command.
        backend: submitit, sbatch or local.
        runs_dir: folder of the run directories.
        run_dir: a new run directory; default: one in `runs_dir`, under the job's id.
        earlier: a run to resume in its run directory.
        code: the folder to run in, in a snapshot that the run directory has already, relative to it.
        take_snapshot: whether the job runs a copy of the code, as it is now.
        source: what asked for it, for the script's header.
        must_run: False for a look only: a job for Slurm is then shown where there is none, too.

    Raises:
        SpecError: nothing to run, or a request that the backend can't meet; it says which can.
        RunDirError: a snapshot of a folder that is no git checkout; a new run directory that is there already.
    """
    _check(spec, function, backend)
    if earlier is not None and take_snapshot:
        found = "its job runs the copy that it has, or the code where it was submitted."
        raise SpecError("Resuming a run with a snapshot:", found, "leave the snapshot out, or begin a new run")
    run_dir = _chosen(spec, run_dir, earlier)
    spec = _with_environment(spec)
    scheduler = _scheduler(spec, backend, must_run)
    runs_dir = runs_dir.expanduser().absolute()
    prefix = run_dirs.prefix(runs_dir, spec)
    code = snapshot.subfolder(Path.cwd()) if take_snapshot else code
    source += "\nEach task runs: " + (shlex.join(spec.command) if function is None else repr(function))
    if isinstance(scheduler, ThisMachine):
        runner = submitit_task.module("cluster_ddp.launch.backends.local_supervisor")
        script = render_local(spec, source=source, runner=runner, code=code)
    else:
        pickled = None if backend == "sbatch" else submitit_task.runner(str(run_dir or f"{prefix}%j"))
        script = render(spec, source=source, run_prefix=prefix, run_dir=run_dir, runner=pickled, code=code)
    return Plan(
        spec=spec,
        function=function,
        backend=backend,  # type: ignore[arg-type]  # checked above
        scheduler=scheduler,
        runs_dir=runs_dir,
        run_dir=run_dir,
        earlier=earlier,
        code=code,
        take_snapshot=take_snapshot,
        script=script,
    )


def _check(spec: JobSpec, function: Callable[..., Any] | None, backend: str) -> None:
    """There is such a backend, and it can run what it is to run."""
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
    if function is not None:
        _check_function(spec)
    elif spec.launcher == "fork":
        parse_python_command.interpreter_words(spec.command)


def _check_function(spec: JobSpec) -> None:
    """A function is loaded by the Python that submits it, and called in a task for each GPU: the rest has no effect."""
    loaded = f"a function is loaded by the Python that submits it, {sys.executable}."
    command = 'submit a command instead: cluster_ddp.submit(spec, ["python", "train.py"])'
    inside = f"submit from inside that environment, or {command}"
    venv = spec.venv if _is_prefix(spec.venv) else None
    conda_env = spec.conda_env if spec.conda_env == os.environ.get("CONDA_DEFAULT_ENV") else None
    for name, possible, found, hint in (
        ("command", (), "a job runs one of the two.", "leave the function out, or the command of the spec"),
        ("container", None, loaded, command),
        ("container_image", None, loaded, command),
        ("venv", venv, loaded, inside),
        ("conda_env", conda_env, loaded, inside),
        ("launcher", "srun", "a function is called in a task for each GPU.", f'launcher="srun", or {command}'),
    ):
        if (value := getattr(spec, name)) != possible:
            raise SpecError(f"Submitting a function with {name}={value!r}:", found, hint)


def _is_prefix(venv: str | None) -> bool:
    return venv is not None and Path(venv).expanduser().resolve() == Path(sys.prefix).resolve()


def _chosen(spec: JobSpec, run_dir: Path | None, earlier: Earlier | None) -> Path | None:
    """The run directory that was chosen, absolute."""
    path = earlier.run_dir if earlier else run_dir and run_dir.expanduser().absolute()
    if path is None:
        return None
    if spec.array is not None:
        found = f"each of the {grids.count(spec.array)} tasks of the array needs one of its own."
        raise SpecError(f"Running in the run directory {path}:", found, "--runs-dir PATH holds them all")
    if earlier is None and os.path.lexists(path):
        found = "it is there already, and a new run needs a new one."
        raise RunDirError(f"Running in the run directory {path}:", found, f"resume what is in it: --resume {path}")
    return path


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
