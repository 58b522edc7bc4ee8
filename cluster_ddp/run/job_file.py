"""job.json, the id of a run directory's job; and the link runs/NAME-ID. The run directory is made before the job.

The tasks of an array have their run directories in that of the whole: runs/NAME-ID/3.

The submission writes both as soon as Slurm has told the id. If it was killed before, the job's agent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

from cluster_ddp.run.files import atomic_write, read_regular
from cluster_ddp.run.names import File

_NAMED = re.compile(r"(.+)-\d{8}-\d{6}-[0-9a-f]{6}")
_BYTES, _SPEC_BYTES = 4096, 8 << 20

AnyPath = TypeVar("AnyPath", bound=PurePath)


class JobFile(NamedTuple):
    """The content of job.json."""

    job: str
    """The job's id as squeue shows it: 12, or 12_3 for an array task."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one."""
    time: float = 0.0
    """UNIX time by which it had been submitted."""
    host: str = ""
    """On a machine without Slurm: that machine's name."""
    process: str = ""
    """On a machine without Slurm: when its process was started; see `processes.started`."""


def new_name(name: str) -> str:
    """Return the name of a new run directory for a job of this name."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def name_in(folder: Path) -> str | None:
    """Return the job's name, by that of its run directory; None if no submission has named that."""
    named = _NAMED.fullmatch(named_by_us(folder).name)
    return named[1] if named else None


def named_by_us(folder: AnyPath) -> AnyPath:
    """Return the run directory that a submission has named: that of the whole array, if it is that of a task."""
    return folder.parent if folder.name.isdecimal() and _NAMED.fullmatch(folder.parent.name) else folder


def title(folder: PurePath) -> str:
    """Return the name of a run directory; of an array's task, after that of the whole: fit-20261126-204432-7f3a9c/3."""
    return str(folder.relative_to(named_by_us(folder).parent))


def write(folder: Path, job: JobFile, *, shared: bool) -> None:
    """Write job.json.

    Raises:
        OSError: it can't be written.
    """
    with atomic_write(folder / File.JOB, shared=shared) as file:
        file.write(json.dumps(job._asdict()).encode() + b"\n")


def whole_array(folder: Path, array_task: object) -> Path:
    """Return the directory of a whole array, by that of one of its tasks; `folder` itself if it was renamed."""
    folder = folder.resolve()  # it may be ".", or a link
    return folder.parent if folder.name == str(array_task) else folder


def read(folder: Path, array_task: object = None) -> JobFile | None:
    """Return which job has a run directory; None if that is not known (yet).

    Args:
        folder: the run directory.
        array_task: the number of the array's task that has it; None if a job has it. Before the start of a task, the
            whole array's job.json tells.

    Raises:
        OSError: job.json can't be read, or is not a regular file.
        ValueError: it is damaged.
    """
    try:
        record = json.loads(read_regular(folder / File.JOB, _BYTES))
        return JobFile(**{name: record[name] for name in JobFile._fields if name in record})
    except FileNotFoundError:
        whole = None if array_task is None else read(whole_array(folder, array_task))
        return whole and whole._replace(job=f"{whole.job}_{array_task}")
    except TypeError as error:
        raise ValueError(f"{File.JOB} is damaged: {error}") from error


def link_of(folder: Path, job: str) -> Path | None:
    """Return where the link NAME-ID to a run directory is; None if no submission has named that.

    An array has one for all its tasks: of 12_3, it is NAME-12/3.
    """
    name, (array, _, task) = name_in(folder), job.partition("_")
    return None if name is None else named_by_us(folder).with_name(f"{name}-{array}") / task


def link(folder: Path, job: str) -> Path | None:
    """Let NAME-ID lead to a run directory. Returns that link; None if there is none."""
    path = link_of(folder, job)
    return path if path is not None and point(path, folder) else None


def leads_to(link: Path, target: Path) -> bool:
    """Return whether a path leads to `target`."""
    return link.resolve() == target.resolve()


def point(link: Path, target: Path) -> bool:
    """Let a link point at `target`, beside or below it; an older link is replaced. Returns whether it does.

    A file or a folder with its name stays; it may not be to be written, either. That is no reason to fail.
    """
    temporary, to = link.with_name(f".{link.name}.{os.urandom(4).hex()}.tmp"), os.path.relpath(target, link.parent)
    try:
        with contextlib.suppress(FileExistsError):
            link.symlink_to(to)
            return True
        if leads_to(link, target):
            return True
        if not link.is_symlink():
            return False
        temporary.symlink_to(to)
        temporary.replace(link)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True


def complete(folder: Path, job: JobFile, *, shared: bool) -> None:
    """Write job.json and the link, at the start of a job whose submission was killed before it could.

    Of an array's task, a submission leaves job.json to it: thousands of files would take long. Of a run directory that
    `launch` was given, this job has it now.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not os.path.lexists(folder / File.SPEC):
            known = read(folder)
            if known is None or known.job != job.job:
                write(folder, job, shared=shared)
            return
        if os.path.lexists(folder / File.JOB):
            return
        task = json.loads(read_regular(folder / File.SPEC, _SPEC_BYTES)).get("array_task")
        if task is not None and (whole := whole_array(folder, task)) != folder.resolve():
            complete(whole, job._replace(job=job.job.partition("_")[0]), shared=shared)
        write(folder, read(folder, task) or job, shared=shared)
        if "_" not in job.job:
            link(folder, job.job)
