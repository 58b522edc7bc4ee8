"""From a job as data to a plan: which scheduler, which run directory, which script. Changes nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cluster_ddp.agent import command_program
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.option_form import default_of
from cluster_ddp.run import places
from cluster_ddp.run.names import File
from cluster_ddp.submission import grids
from cluster_ddp.submission.backends import submitit_task
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.frozen import code_snapshot, venv_archive
from cluster_ddp.submission.pack import jobs as pack_jobs
from cluster_ddp.submission.render import agent_options, render, render_local
from cluster_ddp.submission.resume import Earlier
from cluster_ddp.submission.spec import JobSpec, derived


@dataclass(kw_only=True, slots=True)
class Plan:
    """A job, made ready to be submitted. Making it changes nothing outside; nobody changes it afterwards.

    Raises:
        SpecError: there is nothing to run, the arguments contradict each other, or the job can't run on this machine.
        RunDirError: the working folder is not in a git checkout (for a snapshot); the new run directory exists already.
    """

    spec: JobSpec
    """The job. It is kept with absolute paths, and with its environment chosen."""
    function: Callable[..., Any] | None = None
    """Function to call in each task instead of the spec's command. An array task's values are its keyword arguments."""
    local: bool = False
    """Run the job on this machine even if Slurm is available."""
    runs_dir: InitVar[Path] = Path("runs")
    """Folder of the run directories."""
    run_dir: InitVar[Path | None] = None
    """The new run directory. None: it gets a name in `runs_dir`."""
    earlier: Earlier | None = None
    """The run to resume, in its run directory."""
    code: str | None = None
    """Working folder of the job in its snapshot, relative to the run directory; None without a snapshot."""
    take_snapshot: bool = False
    """Whether the job runs a copy of the code as it is now."""
    source: InitVar[str] = "Submitted by cluster_ddp.submit from Python."
    """How the job was submitted, for the script's header."""
    must_run: InitVar[bool] = True
    """False to only show the plan. A job that needs Slurm can then be planned without Slurm, too."""
    folder: Path = field(init=False)
    """The run directory, absolute: a new one, or that of `earlier`. Of an array, that of the whole; each
    task has its own in it, by number."""
    for_slurm: JobSpec = field(init=False)
    """What Slurm is asked for: `spec`; of an array whose tasks share jobs, an array of those jobs."""
    holders: Mapping[int, int] = field(init=False)
    """Then, number of a task -> number of the job that holds it; else empty."""
    is_chosen: bool = field(init=False)
    """Whether the user has chosen that. Else it gets a new name, and runs/latest leads to it."""
    scheduler: Slurm | ThisMachine = field(init=False)
    """What runs the job: Slurm or this machine."""
    venv_archive: Path | None = field(init=False)
    """The file that the job's environment is packed into (--stage-env); None if it is used where it is."""
    script: str = field(init=False)
    """The script, as text."""

    def __post_init__(self, runs_dir: Path, run_dir: Path | None, source: str, must_run: bool) -> None:
        if self.function is not None:
            _check_function(self.spec)
        elif not self.spec.command:
            raise SpecError(
                "Submitting a job without a command:", "there is nothing to run.", "give a command after --"
            )
        if self.earlier is not None and self.take_snapshot:
            found = "a resumed run uses the snapshot that it has, or the code where it was submitted."
            raise SpecError("Resuming a run with a snapshot:", found, "leave the snapshot out, or start a new run")
        self.spec = _with_environment(self.spec)
        self.for_slurm, self.holders = pack_jobs.of(self.spec), pack_jobs.holders(self.spec)
        runs_dir, chosen = runs_dir.expanduser().absolute(), self._chosen_run_dir(run_dir)
        self.folder = chosen or runs_dir / places.new_name(self.spec.name)
        self.is_chosen = chosen is not None
        if self.take_snapshot:
            self.code = code_snapshot.subfolder(Path.cwd())
        self.scheduler = _scheduler(self.spec, self.local, must_run)
        staged = venv_archive.require(self.spec) if self.spec.stage_env else None
        self.venv_archive = staged and venv_archive.path(staged, runs_dir)
        self.script = self._rendered(source)

    @property
    def _of_task(self) -> str:
        """The run directory of a job, or of an array's task: %a stands for its number, for Slurm and our agent."""
        return str(self.folder) if self.spec.array is None else f"{self.folder}/%a"

    @property
    def options(self) -> list[str]:
        """Options for sbatch that are not in the script: what belongs to this submission alone."""
        log = f"{self.folder}/{File.HOLDER_LOG.format('%a')}" if self.holders else f"{self._of_task}/{File.JOB_LOG}"
        return [f"--output={log}", *([] if self.spec.begin is None else [f"--begin={self.spec.begin}"])]

    def __str__(self) -> str:
        """Return the whole plan as text, as --dry-run shows it."""
        if isinstance(self.scheduler, ThisMachine):
            return f"$ bash {File.LOCAL_SCRIPT} {shlex.quote(str(self.folder))}\n\n{self.script}"
        return f"$ sbatch --parsable {shlex.join(self.options)} <{File.BATCH_SCRIPT}\n\n{self.script}"

    def _chosen_run_dir(self, asked_for: Path | None) -> Path | None:
        """The chosen run directory, absolute; None if none is chosen."""
        path = self.earlier.run_dir if self.earlier else asked_for and asked_for.expanduser().absolute()
        if path is None:
            return None
        asked = f"Running in the run directory {path}:"
        if self.spec.array is not None:
            found = f"each of the {grids.count(self.spec.array)} array tasks needs its own."
            raise SpecError(asked, found, "choose a folder for all: --runs-dir PATH")
        if self.earlier is None and os.path.lexists(path):
            found = "it exists already, and a new run needs a new one."
            raise RunDirError(asked, found, f"resume its run: --resume {path}")
        return path

    def _rendered(self, source: str) -> str:
        """The script."""
        spec, is_function = self.spec, self.function is not None
        command, restart_args = spec.command, spec.restart_args
        if is_function:
            command = submitit_task.runner(self._of_task)
        elif spec.launcher == "fork":
            command_program.interpreter_words(command)  # refuses what can't be forked
        if self.earlier is not None:  # the command has them from its first start on
            command, restart_args = (*command, *shlex.split(restart_args)), ""
        asked = agent_options(spec, command=command, restart_args=restart_args, function=is_function)
        source += f"\nEach task runs: {repr(self.function) if is_function else shlex.join(command)}"
        if isinstance(self.scheduler, ThisMachine):
            return render_local(spec, asked, source=source, code=self.code)
        asked = replace(
            asked,
            run_dir=self._of_task,
            code=None if self.code is None else f"{self.folder}/{self.code}",
            venv=spec.venv if self.venv_archive else None,
            stage_env=str(self.venv_archive) if self.venv_archive else None,
        )
        asked = replace(asked, **pack_jobs.agent_options(spec))
        return render(self.for_slurm, asked, source=source, agent=shlex.quote(f"{self.folder}/{File.AGENT}"))


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
    for name, value in _unfit_for_function(spec).items():
        raise SpecError(f"Submitting a function with {name}={value!r}:", *reasons.get(name, (loaded, command)))


def _unfit_for_function(spec: JobSpec) -> dict[str, Any]:
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


def _with_environment(spec: JobSpec) -> JobSpec:
    """Make paths absolute. Without a named environment, use this Python's virtual environment, active or not."""
    paths = {name: _absolute(getattr(spec, name)) for name in ("venv", "container", "template")}
    named = spec.venv or spec.conda_env or spec.container or spec.container_image
    if not named:
        paths["venv"] = own_venv()
    return derived(spec, **paths)


def own_venv() -> str | None:
    """Return the virtual environment of this Python; None if it is in none."""
    is_one = sys.prefix != sys.base_prefix and Path(sys.prefix, "bin", "activate").is_file()
    return sys.prefix if is_one else None


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _scheduler(spec: JobSpec, local: bool, must_run: bool) -> Slurm | ThisMachine:
    has_slurm = shutil.which("sbatch") is not None
    found = _not_on_this_machine(spec)
    if not local and (has_slurm or (found and not must_run)):
        return Slurm()
    if found:
        asked = f"Running this job on this machine ({'--local' if local else 'no sbatch on the PATH'}):"
        raise SpecError(asked, found, "submit it where Slurm is" + (", with --no-local" if local else ""))
    return ThisMachine()


def _not_on_this_machine(spec: JobSpec) -> str:
    """Why only Slurm can run the job; empty if this machine can run it, too."""
    if spec.nodes > 1:
        possible = f"--nodes 1 --gpus-per-node {spec.gpus_per_node}"
        return f"it asks for {spec.nodes} nodes, but this machine is one node; {possible} would fit."
    defaults = {one.name: default_of(one) for one in fields(spec)}
    for name, what in (
        ("array", "arrays"),
        ("chain", "chains of jobs"),
        ("after", "job dependencies"),
        ("begin", "start times"),
        ("container_image", "Pyxis images"),
        ("stage_env", "environments that nodes unpack"),
        ("doctor", "the doctor before the ranks start"),
        ("spare_nodes", "spare nodes"),
        ("max_mem", "more memory after a requeue"),
    ):
        if getattr(spec, name) != defaults[name]:
            return f"it sets {name}={getattr(spec, name)!r}, and only Slurm supports {what}."
    return ""
