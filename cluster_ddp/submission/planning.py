"""From a request to a plan: which scheduler, which script. Changes nothing."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.agent import python_command
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.protocol import File
from cluster_ddp.submission import grids, run_dirs
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import WAIT, Slurm
from cluster_ddp.submission.copies import snapshot, venv_archive
from cluster_ddp.submission.render import agent_options, render, render_local
from cluster_ddp.submission.resume import Earlier
from cluster_ddp.submission.spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to submit, and how."""

    spec: JobSpec
    """The job."""
    function: Callable[..., Any] | None = None
    """Function to call in each task instead of the spec's command. An array task's values are its keyword arguments."""
    reference_options: tuple[str, ...] | None = None
    """Options of the reference job; None if `function` is not the reference job."""
    local: bool = False
    """Run the job on this machine even if Slurm is available."""
    runs_dir: Path = Path("runs")
    """Folder of the run directories."""
    run_dir: Path | None = None
    """The new run directory. Default: <name>-<job id> in `runs_dir`."""
    earlier: Earlier | None = None
    """The run to resume, in its run directory."""
    code: str | None = None
    """Working folder of the job in its snapshot, relative to the run directory; None without a snapshot."""
    take_snapshot: bool = False
    """Whether the job runs a copy of the code as it is now."""
    source: str = "Submitted by cluster_ddp.submit from Python."
    """How the job was submitted, for the script's header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A job that is ready to be submitted."""

    request: Request
    """The request, with absolute paths and with its environment and working folder chosen."""
    scheduler: Slurm | ThisMachine
    """What runs the job: Slurm or this machine."""
    script: str
    """The script, as text."""
    venv_archive: Path | None = None
    """The file that the job's environment is packed into (--stage-env); None if it is used where it is."""

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self.request.spec

    @property
    def options(self) -> list[str]:
        """Options for sbatch that are not in the script."""
        folder = self.request.run_dir or _prefix(self.request) + ("%A_%a" if self.spec.array else "%j")
        return [f"--output={folder}/{File.JOB_LOG}"]

    def __str__(self) -> str:
        """Return the whole plan as text, as --dry-run shows it."""
        if isinstance(self.scheduler, ThisMachine):
            folder = self.request.run_dir or f"{_prefix(self.request)}<process id>"
            return f"$ bash {File.LOCAL_SCRIPT} {folder}\n\n{self.script}"
        start = f"scontrol update JobId=<id> StartTime={self.spec.begin or 'now'}   # once its run directory is made"
        return f"$ sbatch --parsable {WAIT} {shlex.join(self.options)} <{File.BATCH_SCRIPT}\n$ {start}\n\n{self.script}"


def plan(request: Request, *, must_run: bool = True) -> Plan:
    """Plan a submission. Changes nothing.

    Args:
        request: what to submit.
        must_run: False to only show the plan. A job that needs Slurm can then be planned without Slurm, too.

    Raises:
        SpecError: there is nothing to run, the request contradicts itself, or the job can't run on this machine.
        RunDirError: the working folder is not in a git checkout (for a snapshot); the new run directory exists already.
    """
    _check(request)
    spec = _with_environment(request.spec)
    request = dataclasses.replace(
        request,
        spec=spec,
        runs_dir=request.runs_dir.expanduser().absolute(),
        run_dir=_chosen(request),
        code=snapshot.subfolder(Path.cwd()) if request.take_snapshot else request.code,
    )
    scheduler = _scheduler(request, must_run)
    local = isinstance(scheduler, ThisMachine)
    command, runs = _command(request)
    archive = venv_archive.path(venv_archive.require(spec), request.runs_dir) if spec.stage_env else None
    asked = agent_options(spec, command, is_function=request.function is not None)
    if request.earlier is not None:
        asked = asked._replace(restart_args="")  # the command has them from its first start on
    source = f"{request.source}\nEach task runs: {runs}"
    if local:
        script = render_local(spec, asked, source=source, code=request.code)
    else:
        asked = asked._replace(**_places(request, archive))
        script = render(spec, asked, source=source, agent=_agent(request))
    return Plan(request=request, scheduler=scheduler, script=script, venv_archive=archive)


def _command(request: Request) -> tuple[Sequence[str], str]:
    """What each rank runs, and how the script's header names it."""
    if request.function is None:
        if request.spec.launcher == "fork":
            python_command.interpreter_words(request.spec.command)  # refuses what can't be forked
        more = shlex.split(request.spec.restart_args) if request.earlier is not None else []
        command = (*request.spec.command, *more)
        return command, shlex.join(command)
    return submitit_task.runner(str(request.run_dir or f"{_prefix(request)}%j")), repr(request.function)


def _agent(request: Request) -> str:
    """Where the frozen agent is, as a word for bash."""
    job = '"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"'
    whole = shlex.quote(str(request.run_dir)) if request.run_dir else shlex.quote(_prefix(request)) + job
    return f"{whole}/{File.AGENT}"


def _places(request: Request, archive: Path | None) -> dict[str, Any]:
    """The run directory, where the code is, and the packed environment, as the agent is to be told."""
    whole = str(request.run_dir or f"{_prefix(request)}%A")  # of an array, that of all tasks
    return {
        "run_dir": str(request.run_dir or f"{_prefix(request)}%j"),
        "code": None if request.code is None else f"{whole}/{request.code}",
        "venv": request.spec.venv if archive else None,
        "stage_env": archive and str(archive),
    }


def _prefix(request: Request) -> str:
    return run_dirs.prefix(request.runs_dir, request.spec)


def _check(request: Request) -> None:
    """Check that there is something to run, and that the request does not contradict itself."""
    if request.function is not None:
        _check_function(request.spec)
    elif not request.spec.command:
        raise SpecError("Submitting a job without a command:", "there is nothing to run.", "give a command after --")
    if request.earlier is not None and request.take_snapshot:
        found = "a resumed run uses the snapshot that it has, or the code where it was submitted."
        raise SpecError("Resuming a run with a snapshot:", found, "leave the snapshot out, or start a new run")


def _check_function(spec: JobSpec) -> None:
    """Refuse settings that have no effect on a function."""
    loaded = f"a function is loaded by the Python that submits it, {sys.executable}."
    command = 'submit a command instead: cluster_ddp.submit(spec, ["python", "train.py"])'
    reasons = {
        "command": ("a job runs either a function or a command.", "leave out the function, or the command of the spec"),
        "venv": (loaded, f"submit from inside that environment, or {command}"),
        "conda_env": (loaded, f"submit from inside that environment, or {command}"),
        "launcher": ("a function is called in one task per GPU.", f'launcher="srun", or {command}'),
        "restart_args": ("a function has no command line.", f"leave out restart_args, or {command}"),
    }
    for name, value in unfit_for_function(spec).items():
        raise SpecError(f"Submitting a function with {name}={value!r}:", *reasons.get(name, (loaded, command)))


def unfit_for_function(spec: JobSpec) -> dict[str, Any]:
    """Return the fields of a specification that a function can't have, with their values."""
    here = Path(sys.prefix).resolve()
    fits = {
        "command": not spec.command,
        "container": not spec.container,
        "container_image": not spec.container_image,
        "venv": not spec.venv or Path(spec.venv).expanduser().resolve() == here,
        "conda_env": not spec.conda_env or spec.conda_env == os.environ.get("CONDA_DEFAULT_ENV"),
        "launcher": spec.launcher == "srun",
        "restart_args": not spec.restart_args,
    }
    return {name: getattr(spec, name) for name, it_fits in fits.items() if not it_fits}


def _chosen(request: Request) -> Path | None:
    """The chosen run directory, absolute; None if the job's id names it."""
    earlier, chosen, array = request.earlier, request.run_dir, request.spec.array
    path = earlier.run_dir if earlier else chosen and chosen.expanduser().absolute()
    if path is None:
        return None
    if array is not None:
        found = f"each of the {grids.count(array)} array tasks needs its own."
        raise SpecError(f"Running in the run directory {path}:", found, "choose a folder for all: --runs-dir PATH")
    if earlier is None and os.path.lexists(path):
        found = "it exists already, and a new run needs a new one."
        raise RunDirError(f"Running in the run directory {path}:", found, f"resume its run: --resume {path}")
    return path


def _with_environment(spec: JobSpec) -> JobSpec:
    """Make paths absolute. Without a named environment, use this Python's virtual environment, active or not."""
    paths = {name: _absolute(getattr(spec, name)) for name in ("venv", "container", "template")}
    spec = dataclasses.replace(spec, **paths)  # type: ignore[arg-type]
    named = spec.venv or spec.conda_env or spec.container or spec.container_image
    if named or sys.prefix == sys.base_prefix or not Path(sys.prefix, "bin", "activate").is_file():
        return spec
    return dataclasses.replace(spec, venv=sys.prefix)


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _scheduler(request: Request, must_run: bool) -> Slurm | ThisMachine:
    has_slurm = shutil.which("sbatch") is not None
    found = _not_on_this_machine(request.spec)
    if not request.local and (has_slurm or (found and not must_run)):
        return Slurm()
    if found:
        asked = f"Running this job on this machine ({'--local' if request.local else 'no sbatch on the PATH'}):"
        raise SpecError(asked, found, "submit it where Slurm is" + (", with --no-local" if request.local else ""))
    return ThisMachine()


def _not_on_this_machine(spec: JobSpec) -> str:
    """Why only Slurm can run the job; empty if this machine can run it, too."""
    if spec.nodes > 1:
        possible = f"--nodes 1 --gpus-per-node {spec.gpus_per_node}"
        return f"it asks for {spec.nodes} nodes, but this machine is one node; {possible} would fit."
    for name, what in (
        ("array", "arrays"),
        ("after", "job dependencies"),
        ("begin", "start times"),
        ("container_image", "Pyxis images"),
        ("stage_env", "environments that nodes unpack"),
        ("doctor", "the doctor before the ranks start"),
        ("spare_nodes", "spare nodes"),
    ):
        if getattr(spec, name) not in (None, False):
            return f"it sets {name}={getattr(spec, name)!r}, and only Slurm supports {what}."
    return ""
