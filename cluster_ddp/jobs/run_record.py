"""What is known of a run directory: by its spec.json; where no submission made it, by its run.json or its lock file."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cluster_ddp.errors import RunDirError
from cluster_ddp.run import job_file, places, spec_file
from cluster_ddp.run.files import read_json, why
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import File
from cluster_ddp.slurm.variables import job_label
from cluster_ddp.submission import run_dirs
from cluster_ddp.submission.backends.local import ThisMachine
from cluster_ddp.submission.backends.slurm import Slurm


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run directory."""

    run_dir: Path
    """As it was found."""
    job: str = ""
    """The id of its job as squeue shows it, 12 or 12_3; empty outside a job."""
    name: str
    """Name of the job; of a training that nobody submitted, that of its folder."""
    runs_on: Literal["Slurm", "this machine"] | None = None
    """What runs it, if known."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one."""
    values: Mapping[str, str] = field(default_factory=dict)
    """An array task's values of the grid."""
    began_s: float
    """When it was submitted, or started; UNIX time."""
    node_range: str = ""
    """Of a job that takes what is free, the numbers of nodes: 2-8."""
    ranks: int = 1
    """Number of ranks, of such a job the largest; 1 if no submission made it."""
    is_chain: bool = False
    """Whether its job is a chain (`submit --chain`)."""
    holder: str = ""
    """The job that holds it, if it has no job of Slurm's alone."""
    is_whole_array: bool = False
    """Whether it is the directory of a whole array, beside those of its tasks."""
    problem: str = ""
    """Why it can't be read; then nothing else is known but its directory."""

    @property
    def job_id(self) -> str:
        """The job's id; for an array task the array's."""
        return self.job.partition("_")[0]

    @property
    def is_submitted(self) -> bool:
        """Whether a submission made it."""
        return (self.run_dir / File.SPEC).exists()

    @property
    def scheduler(self) -> Slurm | ThisMachine:
        """What knows its job."""
        return ThisMachine() if self.runs_on == "this machine" else Slurm()

    @property
    def whole(self) -> Path:
        """Its run directory; for an array's task, that of the whole array."""
        task = self.job.partition("_")[2]
        return places.whole_array(self.run_dir, task) if task else self.run_dir

    def is_locked(self) -> bool:
        """Whether a training is writing to it now, as far as its lock file shows."""
        try:
            descriptor = os.open(self.run_dir / File.LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            # fcntl(2): l_type, l_whence, l_start, l_len, l_pid. The answer has F_UNLCK in l_type if nobody holds it.
            asked = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            answer: bytes = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
            return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
        except OSError:
            return False
        finally:
            os.close(descriptor)


def read(path: Path) -> RunRecord:
    """Read what is known of a run directory.

    Raises:
        RunDirError: it is not one, or its spec.json or run.json can't be read.
    """
    if os.path.lexists(path / File.SPEC):
        return _submitted(path, spec_file.read(path))
    asked = f"Reading the run directory {path}:"
    if not is_run(path):
        found = f"it has no {File.SPEC}, {File.RUN} or {File.LOCK} of a training, and no log of a task."
        raise RunDirError(asked, found, "give a folder that a job or a training has made")
    try:
        topology = read_json(path / File.RUN).get("topology")
    except FileNotFoundError:
        topology = None
    except (OSError, ValueError) as error:
        found, hint = f"{File.RUN} can't be read: {why(error)}.", "give the directory of another run"
        raise RunDirError(asked, found, hint) from error
    label = _slurm_job(path, topology if isinstance(topology, dict) else {})
    job = label if isinstance(label, str) and spec_file.is_label(label) else ""
    name = path.resolve().name.removesuffix(f"-{job}")
    began = next((path / name for name in (File.RUN, File.LOCK, File.JOB) if (path / name).exists()), path)
    began_s = changed_s(began)
    return RunRecord(run_dir=path, job=job, name=name, runs_on="Slurm" if job else None, began_s=began_s)


def _slurm_job(path: Path, topology: Mapping[str, Any]) -> object:
    """The id of the job that a run directory had last; "" if it is none of Slurm's: on this machine, a process id."""
    owner = _owner(path)
    found = job_label(*map(topology.get, ("job_id", "array_job_id", "array_task_id"))) or owner.get("job")
    is_local = topology.get("is_local") or owner.get("is_local")
    if launched := _launched(path):
        found, is_local = launched.job, launched.host
    return "" if is_local else found


def _launched(path: Path) -> JobFile | None:
    """The job whose `launch` was given a run directory; None if there is none, or if its file is damaged."""
    with suppress(OSError, ValueError):
        return job_file.read(path)
    return None


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: a submission made it, a training or the ranks of `launch` wrote to it."""
    written = (File.SPEC, File.RUN, File.JOB, File.JOURNAL, File.TASK_LOG.format(0))
    return any(os.path.lexists(path / name) for name in written) or "process" in _owner(path)


def _owner(path: Path) -> dict[str, Any]:
    """What the lock file says of the training that holds it; empty if nothing."""
    try:
        return read_json(path / File.LOCK)
    except (OSError, ValueError):
        return {}


def changed_s(path: Path) -> float:
    """Return when a file was last changed, in seconds of UNIX time; 0 if it can't be read."""
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _submitted(path: Path, record: Mapping[str, Any]) -> RunRecord:
    spec, values = record["spec"], record.get("values")
    known = values.items() if isinstance(values, dict) else ()
    counts = {name: spec.get(name) for name in ("nodes", "max_nodes", "gpus_per_node", "gpus_per_task")}
    least, most, gpus, each = (one if isinstance(one, int) and one > 0 else 1 for one in counts.values())
    ranks = max(least, most) * (gpus // each)
    runs_on: Literal["Slurm", "this machine"] = "Slurm" if run_dirs.is_on_slurm(path, record["job"]) else "this machine"
    return RunRecord(
        run_dir=path,
        job=record["job"],
        name=spec["name"],
        runs_on=runs_on if record["job"] else None,
        cluster=record["cluster"],
        values={key: str(value) for key, value in known if isinstance(value, (str, int, float))},
        began_s=record["submitted"],
        node_range=f"{least}-{most}" if most > least else "",
        ranks=ranks,
        is_chain=spec.get("chain") is True,
        holder=spec_file.holder(record),
        is_whole_array=spec.get("array") is not None and "_" not in record["job"],
    )
