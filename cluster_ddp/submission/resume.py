"""Resume a run: start a new job in the run directory of an earlier one, which has ended.

The earlier job's own files (spec.json, script, logs, pickles) move to job-<its id>/ in the run directory.
The training's files (checkpoints, metrics.jsonl, others that it wrote) stay where they are.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobNotFoundError, RunDirError, SpecError
from cluster_ddp.run import places, spec_file
from cluster_ddp.run.files import make_dir
from cluster_ddp.run.names import ASIDE, File
from cluster_ddp.run.ownership import refuse_others
from cluster_ddp.submission import run_dirs
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.spec import JobSpec

_TRAININGS_OWN = ("auto", "never")


@dataclass(frozen=True, slots=True)
class Pickled:
    """The pickled function of an earlier job."""

    content: bytes

    def __call__(self, **values: str) -> Any:
        """Never called: the job calls the function in the pickle."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "the earlier job's function"


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """A run directory, and the last job in it."""

    run_dir: Path
    """Absolute."""
    job: str = ""
    """The job's id as squeue shows it; empty if no submission has made the run directory."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one."""
    local: bool = False
    """Whether it was submitted with --local."""
    folder: Path | None = None
    """The folder in which it was submitted."""
    code: str | None = None
    """The working folder in its copy of the code, relative to the run directory; None without --snapshot."""
    spec: JobSpec | None = None
    """Its specification. An array task has that of a single job."""

    def enter(self) -> JobSpec:
        """Change to the folder in which it was submitted, so that relative paths hold. Returns its specification.

        Raises:
            RunDirError: no submission has made the run directory, or the folder can't be entered.
        """
        asked, again = f"Resuming {self.run_dir}:", run_dirs.resume_command(self.run_dir)
        if self.spec is None or self.folder is None:
            found = f"it has no {File.SPEC}, so no submission has made it."
            raise RunDirError(asked, found, f"give the command to run: {again} -- COMMAND")
        try:
            os.chdir(self.folder)
        except OSError as error:
            found = f"it was submitted in {self.folder}, which can't be entered: {error.strerror}."
            raise RunDirError(asked, found, f"give the command to run from here: {again} -- COMMAND") from error
        return self.spec

    def function(self) -> Pickled | None:
        """Return the function that it called in each task; None if it ran a command.

        Raises:
            RunDirError: the pickle is missing, or others could have changed it.
        """
        if self.spec is None or self.spec.command:
            return None
        path = self.run_dir / File.FUNCTION
        refuse_others(path)
        return Pickled(path.read_bytes())

    def refuse_unended(self) -> None:
        """Check that the job has ended. A job that Slurm has forgotten has ended.

        Raises:
            SpecError: it has not ended; two jobs must not run in one run directory.
            SlurmError: Slurm does not answer.
        """
        if not self.job:
            return
        on_slurm = run_dirs.is_on_slurm(self.run_dir, self.job)
        scheduler: Slurm | ThisMachine = Slurm() if on_slurm else ThisMachine()
        try:
            status = scheduler.statuses(self.job, self.cluster, self.run_dir)[0]
        except JobNotFoundError:
            return  # forgotten, so it has ended
        if not status.ended:
            end_it = f"cluster-ddp cancel {shlex.quote(str(self.run_dir))}"
            found = f"job {self.job} is {status.state} in it, and a run directory is for one job at a time."
            raise SpecError(f"Resuming {self.run_dir}:", found, f"wait until it has ended, or end it: {end_it}")


def _may_enter(path: Path) -> bool:
    """Whether this user may look into a folder; True if there is none."""
    try:
        return not path.is_dir() or os.access(path, os.X_OK)
    except PermissionError:  # up to Python 3.13
        return False


def find(asked: str | os.PathLike[str], runs_dir: Path) -> Earlier:
    """Find the run to resume.

    Args:
        asked: its run directory, or the id of a job that has run in it: 12, or 12_3 for an array task.
        runs_dir: folder of the run directories, in which an id is looked up.

    Raises:
        RunDirError: it does not exist, its spec.json is of no use, or others could have changed that or the folder.
        SpecError: it is a whole array; its tasks are resumed one by one.
    """
    path = Path(asked).expanduser()
    if not _may_enter(path):
        hint = "give the run directory of a job of yours"
        raise RunDirError(f"Resuming {path}:", "you may not enter this folder, or one above it.", hint)
    if not path.is_dir():
        path = _of_job(os.fspath(asked), runs_dir)
    path = path.resolve()
    if not (path / File.SPEC).exists():
        refuse_others(path)  # the job's scripts and logs will be in it
        return Earlier(run_dir=path)
    refuse_others(path / File.SPEC)  # the job would run its content as us
    record = spec_file.read(path)
    if not record["job"]:
        found = "no job is known of it: another submission is under way, or was killed before it knew its job."
        undo = run_dirs.undo_command(path)
        raise RunDirError(f"Resuming {path}:", found, f"if squeue --me shows none, either, undo that: {undo}")
    if record["spec"].get("array") is not None:
        found = f"it is the directory of a whole array, job {record['job']}; its tasks are resumed one by one."
        raise SpecError(f"Resuming {path}:", found, run_dirs.resume_command(path.with_name(f"{path.name}_0")))
    return Earlier(
        run_dir=path,
        job=record["job"],
        cluster=record.get("cluster"),
        local=record.get("local") is True,
        folder=Path(record["folder"]) if "folder" in record else None,
        code=record.get("code"),
        spec=_spec(path, record["spec"]),
    )


def set_aside(earlier: Earlier) -> Path | None:
    """Move the earlier job's own files to job-<its id>/.

    Returns:
        That folder; None if there was no job.

    Raises:
        RunDirError: the files can't be moved; or the folder exists, since another submission is resuming the run.
    """
    if not earlier.job:
        return None
    aside = earlier.run_dir / ASIDE.format(earlier.job)
    asked, look = f"Moving the files of job {earlier.job} to {aside}:", f"ls -la {shlex.quote(str(earlier.run_dir))}"
    try:
        make_dir(aside, shared=earlier.spec is not None and earlier.spec.share)
    except OSError as error:
        raise RunDirError(asked, f"{error.strerror}.", f"check whether somebody else is resuming it: {look}") from error
    try:
        _move(earlier.run_dir, aside)
    except OSError as error:
        _move(aside, earlier.run_dir)
        aside.rmdir()
        raise RunDirError(asked, f"{error.strerror}.", f"check that you may write all of it: {look}") from error
    return aside


def put_back(aside: Path) -> None:
    """Undo `set_aside`. Removes the files that the new job has written by now."""
    for path in _files(aside.parent):
        path.unlink()
    _move(aside, aside.parent)
    aside.rmdir()


def _files(folder: Path) -> list[Path]:
    return [path for pattern in run_dirs.OF_A_JOB for path in folder.glob(pattern)]


def _move(source: Path, target: Path) -> None:
    for path in _files(source):
        path.rename(target / path.name)


def _of_job(label: str, runs_dir: Path) -> Path:
    """The run directory that a job has run in, as the last job or an earlier one; of several, the newest."""
    if spec_file.is_label(label):
        last = {path: at for path in places.each(runs_dir) if (at := _submitted(path, label)) is not None}
        aside = ASIDE.format(label)
        earlier = {path: (path / aside).lstat().st_mtime for path in places.of_earlier(runs_dir, label)}
        if found := last or earlier:
            return max(found, key=lambda path: found[path])
    if label in _TRAININGS_OWN:
        hint = f"give it to the training: -- python -m cluster_ddp.train --resume {label}"
    else:
        hint = (
            "give the path of the run directory, or the folder that holds it: --runs-dir PATH; of a job of cluster-ddp "
            "launch, the path and the command: --resume PATH -- COMMAND"
        )
    words = f"there is no such folder, and {runs_dir} has no job {label} of cluster-ddp submit."
    raise RunDirError(f"Resuming {label}:", words, hint)


def _submitted(path: Path, label: str) -> float | None:
    """When the last job of a run directory was submitted; None if that is another job."""
    try:
        record = spec_file.read(path)
    except RunDirError:
        return None  # not made by a submission, or damaged
    return float(record["submitted"]) if label == record["job"] else None


def _spec(path: Path, record: dict[str, Any]) -> JobSpec:
    """The specification in a spec.json, without what the earlier job waited for."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    values |= {"grid": {}, "after": None, "begin": None}
    known = {field.name for field in dataclasses.fields(JobSpec)}
    try:
        if unknown := sorted(set(values) - known):
            raise ValueError(f"this version does not know {', '.join(unknown)}")
        return JobSpec(**values)
    except (ValueError, TypeError, SpecError) as error:
        found = f"its {File.SPEC} is of no use: {getattr(error, 'found', error)}"
        hint = f"give the command to run: {run_dirs.resume_command(path)} -- COMMAND"
        raise RunDirError(f"Resuming {path}:", found, hint) from error
