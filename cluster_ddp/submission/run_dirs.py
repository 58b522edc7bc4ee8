"""The run directories of a submission. Each is made and named before there is a job.

    runs/fit-20261126-204432-7f3a9c/
                            spec.json   what was submitted, by which command, when and where
                            job.json    the job's id
                            job.sbatch  the script (job.sh on this machine); function.pkl for a function
                            code/       the copy of the code, with --snapshot
                            job.log     what the batch script printed, and Slurm's messages about the job
                            task-0.log  what task 0 printed, and so on
                            job.jsonl   how each start of its ranks ended, and what failed first
                            metrics.jsonl, run.json  written by a training that uses cluster_ddp

The link runs/fit-12 leads there, runs/latest to the last one. An array has such a folder for the whole (script,
snapshot), and in it one for each task: runs/fit-12/0, runs/fit-12/1 …
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from cluster_ddp.errors import RunDirError
from cluster_ddp.run import job_file
from cluster_ddp.run.files import make_dir, open_own
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import ASIDE, RESUME, File

OF_A_JOB = (
    *(File.SPEC, File.JOB, File.BATCH_SCRIPT, File.LOCAL_SCRIPT, File.AGENT, File.JOB_LOG, File.TASK_LOG.format("*")),
    *(File.CANCEL, File.FUNCTION, "*_submitted.pkl", "*_result.pkl"),
)
"""Patterns of the files that one job in a run directory has: the next one has its own."""
_NO_RESULTS = (
    *(*OF_A_JOB, "job-*", ".*", File.CODE),
    *(File.RUN, File.STARTS, File.METRICS, File.USAGE.format("*"), File.TRACKERS, File.JOURNAL),
)
"""Patterns of the files that nothing resumes from: records of what happened."""


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run, quoted for a shell."""
    return f"{RESUME} {shlex.quote(str(run_dir))}"


def undo_command(run_dir: Path) -> str:
    """Return the command that takes back what a killed submission has written into a run directory."""
    if asides := [*run_dir.glob(ASIDE.format("*"))]:
        last = shlex.quote(str(max(asides, key=lambda aside: aside.stat().st_mtime)))
        return f"find {last} -mindepth 1 -exec mv -t {shlex.quote(str(run_dir))} {{}} + && rmdir {last}"
    written = (File.SPEC, File.BATCH_SCRIPT, File.LOCAL_SCRIPT, File.AGENT, File.FUNCTION)
    return shlex.join(["rm", *(str(run_dir / name) for name in written if (run_dir / name).exists())])


def has_results(run_dir: Path) -> bool:
    """Return whether a run directory has checkpoints or files of the script: without, nothing can be resumed."""
    with contextlib.suppress(OSError):
        return any(not any(fnmatch(one.name, pattern) for pattern in _NO_RESULTS) for one in run_dir.iterdir())
    return False


def prepare(run_dir: Path) -> Path | None:
    """Make the folder for a run directory, and check that it can be written.

    Returns:
        The topmost folder that was made; None if all existed.

    Raises:
        RunDirError: it can't be made or written, or its path has '%', a backslash or a control character.
    """
    runs_dir = run_dir.parent
    if any(not character.isprintable() or character in "%\\" for character in str(run_dir)):
        raise _error(run_dir, "its path must not have '%' or '\\', which Slurm interprets, nor control characters")
    missing = [folder for folder in (runs_dir, *runs_dir.parents) if not folder.exists()]
    with _writing(runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
    if not os.access(runs_dir, os.W_OK | os.X_OK):
        raise _error(runs_dir, "permission denied")
    return missing[-1] if missing else None


def create(path: Path, *, shared: bool) -> None:
    """Make a run directory. Only its owner may enter it; if `shared`, its group may read it.

    Raises:
        RunDirError: it exists already, or can't be made.
    """
    try:
        make_dir(path, shared=shared)
    except FileExistsError as error:
        raise RunDirError(f"Making the run directory {path}:", "it exists already.", "choose another path") from error
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def fill(path: Path, files: Mapping[str, bytes], made: list[Path], *, shared: bool) -> None:
    """Write a job's files, by name, into its run directory; if `shared`, its group may read them. Adds them to `made`.

    They are not fsynced: an array has thousands, and nodes see what was written and closed before.

    Raises:
        RunDirError: a file exists already, or can't be written.
    """
    with _writing(path):
        for name, content in files.items():
            with open(open_own(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shared=shared), "wb") as file:
                made.append(path / name)
                file.write(content)


def note_job(path: Path, job: JobFile, *, shared: bool) -> None:
    """Write into a run directory which job has it. Raises RunDirError if it can't be written."""
    with _writing(path):
        job_file.write(path, job, shared=shared)


def is_on_slurm(path: Path, label: str) -> bool:
    """Return whether Slurm runs the job of a run directory: it is an array's task, or has a batch script."""
    return "_" in label or (path / File.BATCH_SCRIPT).exists()


def remove(paths: Sequence[Path], made: Path | None) -> None:
    """Remove files, and run directories with the links to them; and empty folders from `made` down (see `prepare`)."""
    folders = {path for path in paths if path.is_dir() and not path.is_symlink()}
    for path in {*paths} - folders:
        path.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for runs_dir in {path.parent for path in folders} - folders:
        for beside in runs_dir.iterdir():  # jobs make links, too
            if beside.is_symlink() and runs_dir / beside.readlink() in folders:
                beside.unlink(missing_ok=True)
    if made is not None:
        for left, _, _ in sorted(os.walk(made), reverse=True):
            try:
                Path(left).rmdir()
            except OSError:
                break


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def _error(path: Path, found: str) -> RunDirError:
    hint = "choose another folder: --runs-dir PATH, or --run-dir PATH"
    return RunDirError(f"Writing run directories into {path}:", f"{found}.", hint)
