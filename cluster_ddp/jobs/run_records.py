"""The runs of a folder: what the spec.json of each says; where no submission made it, its run.json or its lock file."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster_ddp.errors import RunDirError
from cluster_ddp.protocol import ASIDE, File
from cluster_ddp.run_files import read_json, why
from cluster_ddp.slurm.variables import job_label
from cluster_ddp.submission import run_dirs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run directory."""

    run_dir: Path
    """As it was found."""
    job: str
    """The id of its job as squeue shows it, 12 or 12_3; empty outside a job."""
    name: str
    """Name of the job; of a training that nobody submitted, that of its folder."""
    scheduler: Literal["Slurm", "this machine"] | None
    """What runs it, if known."""
    cluster: str | None = None
    """Name of its cluster, if sbatch gave one."""
    values: Mapping[str, str]
    """An array task's values of the grid."""
    began_s: float
    """When it was submitted, or started; UNIX time."""
    ranks: int = 1
    """Number of ranks; 1 if no submission made it."""
    tasks: int = 1
    """Number of tasks: ranks, or nodes under torchrun."""
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
        return _submitted(path, run_dirs.read(path))
    if not _is_training(path):
        found = f"it has no {File.SPEC}, {File.RUN} or {File.LOCK} of a training, and no log of a task."
        raise RunDirError(
            f"Reading the run directory {path}:", found, "give a folder that a job or a training has made"
        )
    owner, topology = _json(path / File.LOCK), _run_json(path).get("topology")
    ids = topology if isinstance(topology, dict) else {}
    label = job_label(ids.get("job_id"), ids.get("array_job_id"), ids.get("array_task_id")) or owner.get("job")
    job = label if isinstance(label, str) and run_dirs.is_label(label) else ""
    name = path.resolve().name.removesuffix(f"-{job}")
    began_s = _changed_s(path / (File.RUN if (path / File.RUN).exists() else File.LOCK))
    return RunRecord(run_dir=path, job=job, name=name, scheduler="Slurm" if job else None, values={}, began_s=began_s)


def in_folder(runs_dir: Path) -> list[RunRecord]:
    """Return the runs of a folder, in the order of submission. Whole arrays are passed over."""
    found = []
    for path in {path.parent for name in (File.SPEC, File.RUN, File.LOCK) for path in runs_dir.glob(f"*/{name}")}:
        if path.is_symlink() or (not os.path.lexists(path / File.SPEC) and not _is_training(path)):
            continue
        try:
            found.append(read(path))
        except RunDirError as error:
            found.append(_damaged(path, error.found))
    runs = [one for one in found if not one.is_whole_array]
    return sorted(runs, key=lambda one: (one.began_s, [int(part) for part in one.job.split("_") if part]))


def resumed(label: str, runs_dir: Path) -> RunRecord | None:
    """Return the run of a job that `submit --resume` has resumed as another job since; None if there is none.

    Args:
        label: the earlier job: 12, or 12_3.
        runs_dir: folder of the run directories.
    """
    if not run_dirs.is_label(label):
        return None
    aside = {path.parent: _changed_s(path) for path in runs_dir.glob(f"*/{ASIDE.format(label)}")}
    runs = [one for one in in_folder(runs_dir) if one.run_dir in aside and one.job and one.is_submitted]
    return max(runs, key=lambda one: aside[one.run_dir], default=None)


def _is_training(path: Path) -> bool:
    """Whether a training wrote to it, or the ranks of `cluster-ddp launch`."""
    written = (File.RUN, File.OUTCOME, File.TASK_LOG.format(0))
    return any(os.path.lexists(path / name) for name in written) or "process" in _json(path / File.LOCK)


def _damaged(path: Path, problem: str) -> RunRecord:
    began_s = _changed_s(path)
    return RunRecord(run_dir=path, job="", name=path.name, scheduler=None, values={}, began_s=began_s, problem=problem)


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _submitted(path: Path, record: Mapping[str, Any]) -> RunRecord:
    values, spec = record.get("values"), record["spec"]
    nodes, gpus, each = (_count(spec.get(name)) for name in ("nodes", "gpus_per_node", "gpus_per_task"))
    ranks = nodes * (gpus // each)
    return RunRecord(
        run_dir=path,
        job=record["job"],
        name=spec["name"],
        scheduler="Slurm" if run_dirs.is_on_slurm(path, record["job"]) else "this machine",
        cluster=record["cluster"],
        values=_texts(values),
        began_s=record["submitted"],
        ranks=ranks,
        tasks=nodes if spec.get("launcher") == "torchrun" else ranks,
        is_whole_array=spec.get("array") is not None and "_" not in record["job"],
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _texts(values: object) -> dict[str, str]:
    """An array task's values, as far as they are text or numbers."""
    known = values.items() if isinstance(values, dict) else ()
    return {key: str(value) for key, value in known if isinstance(value, (str, int, float))}


def _run_json(path: Path) -> dict[str, Any]:
    """The run.json of a run directory; empty if it has none."""
    try:
        return read_json(path / File.RUN)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        found, hint = f"{File.RUN} can't be read: {why(error)}.", "give the directory of another run"
        raise RunDirError(f"Reading the run directory {path}:", found, hint) from error


def _json(path: Path) -> dict[str, Any]:
    """The object in a small file; empty if it has none."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
