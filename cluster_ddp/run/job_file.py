"""job.json: which job has a run directory, which is made before the job.

The submission writes it, and makes the link runs/NAME-ID, as soon as Slurm has told the id. If it was killed before,
the job's agent does.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.run import places
from cluster_ddp.run.files import atomic_write, read_json, read_regular
from cluster_ddp.run.names import File

_BYTES = 4096


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


def write(folder: Path, job: JobFile, *, shared: bool) -> None:
    """Write job.json.

    Raises:
        OSError: it can't be written.
    """
    with atomic_write(folder / File.JOB, shared=shared) as file:
        file.write(json.dumps(job._asdict()).encode() + b"\n")


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
        whole = None if array_task is None else read(places.whole_array(folder, array_task))
        return whole and whole._replace(job=f"{whole.job}_{array_task}")
    except TypeError as error:
        raise ValueError(f"{File.JOB} is damaged: {error}") from error


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
        task = read_json(folder / File.SPEC).get("array_task")
        if task is not None and (whole := places.whole_array(folder, task)) != folder.resolve():
            complete(whole, job._replace(job=job.job.partition("_")[0]), shared=shared)
        write(folder, read(folder, task) or job, shared=shared)
        if "_" not in job.job:
            places.link(folder, job.job)
