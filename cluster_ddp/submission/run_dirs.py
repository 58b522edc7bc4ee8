"""The run directories of a submission: runs/<name>-<job id>. The link runs/latest points at the last one.

    runs/fit-12/            spec.json   what was submitted, by which command, when and where
                            job.sbatch  the script (job.sh on this machine); 12_submitted.pkl for a function
                            code/       the copy of the code, with --snapshot
                            job.log     what the batch script printed, and Slurm's messages about the job
                            task-0.log  what task 0 printed, and so on
                            outcome.json  how its last start ended, and what failed first
                            metrics.jsonl, run.json  written by a training that uses cluster_ddp

An array has one such folder for the whole (script, snapshot) and one per task: runs/fit-12_0, runs/fit-12_1 …
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError
from cluster_ddp.files import make_dir, open_own
from cluster_ddp.protocol import LATEST, RESUME, File
from cluster_ddp.run_files import read_json, why
from cluster_ddp.submission.spec import JobSpec

OF_A_JOB = (
    *(File.SPEC, File.BATCH_SCRIPT, File.LOCAL_SCRIPT, File.AGENT, File.JOB_LOG, File.TASK_LOG.format("*")),
    *(File.FAILURES, File.OUTCOME, File.CHAIN, File.CANCELLED, File.PACKED, File.CANCEL),
    *("*_submitted.pkl", "*_result.pkl"),
)
"""Patterns of the files that one job in a run directory has: the next one has its own."""
_NO_RESULTS = (
    *(*OF_A_JOB, "job-*", ".*", File.CODE),
    *(File.RUN, File.STARTS, File.METRICS, File.USAGE.format("*"), File.TRACKERS, File.ALLOCATIONS),
)
"""Patterns of the files that nothing resumes from: records of what happened."""


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run, quoted for a shell."""
    return f"{RESUME} {shlex.quote(str(run_dir))}"


def has_results(run_dir: Path) -> bool:
    """Return whether a run directory has checkpoints or files of the script: without, nothing can be resumed."""
    with contextlib.suppress(OSError):
        return any(not any(fnmatch(one.name, pattern) for pattern in _NO_RESULTS) for one in run_dir.iterdir())
    return False


def prefix(runs_dir: Path, spec: JobSpec) -> str:
    """Return the path of a job's run directories up to the job's id."""
    return f"{runs_dir}/{spec.name}-"


def prepare(runs_dir: Path, run_dir: Path | None = None) -> Path | None:
    """Make the folder of the run directories, and check that it can be written. Of a chosen one, check the name.

    Returns:
        The topmost folder that was made; None if all existed.

    Raises:
        RunDirError: it can't be made or written, or its path has '%', a backslash or a control character.
    """
    if any(not character.isprintable() or character in "%\\" for character in str(run_dir or runs_dir)):
        found = "its path must not have '%' or '\\', which Slurm interprets, nor control characters"
        raise _error(run_dir or runs_dir, found)
    missing = [folder for folder in (runs_dir, *runs_dir.parents) if not folder.exists()]
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error(runs_dir, error.strerror or str(error)) from error
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
        found = "it exists already: an earlier job, or one of another cluster, had the same name and id."
        raise RunDirError(f"Making the run directory {path}:", found, "choose another --name or --runs-dir") from error
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def fill(path: Path, files: Mapping[str, bytes], *, shared: bool) -> None:
    """Write a job's files into its run directory, by name; if `shared`, its group may read them.

    They are not fsynced: an array has thousands, and the job is released only after they are written.

    Raises:
        RunDirError: a file exists already, or can't be written.
    """
    try:
        for name, content in files.items():
            with open(open_own(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shared=shared), "wb") as file:
                file.write(content)
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def description(
    spec: Mapping[str, Any],
    *,
    label: str,
    local: bool,
    cluster: str | None,
    identity: Mapping[str, str],
    code: str | None,
    values: Mapping[str, str],
    packed: str = "",
    reference_options: Sequence[str] | None = None,
) -> bytes:
    """Return the content of spec.json: JSON, with the present time and working folder.

    Args:
        spec: the fields of this job's specification. An array task has those of a single job.
        label: the job's id as squeue shows it, 12 or 12_3.
        local: whether it was submitted with --local.
        cluster: name of its cluster, if sbatch gave one.
        identity: what tells the job from another one with the same id (`backends.identity`).
        code: working folder in the snapshot, relative to the run directory; None without a snapshot.
        values: this array task's values of the grid.
        packed: the job that holds this array task; empty if the task is a job itself.
        reference_options: options of the reference job; None if it is another job.
    """
    record = {
        "job": label,
        "local": local,
        "cluster": cluster,
        "identity": dict(identity),
        "code": code,
        "command": list(spec["command"]),
        "reference_options": None if reference_options is None else list(reference_options),
        "values": dict(values),
        **({"packed": packed} if packed else {}),
        "submitted": time.time(),
        "folder": str(Path.cwd()),
        "spec": dict(spec),
    }
    return json.dumps(record, indent=2).encode() + b"\n"


def read(path: Path) -> dict[str, Any]:
    """Read the spec.json of a run directory, as `description` made it.

    Raises:
        RunDirError: there is none, or it is damaged.
    """
    try:
        record = read_json(path / File.SPEC)
        label, cluster, spec = str(record["job"]), record.get("cluster"), dict(record["spec"])
        if not (is_label(label) and isinstance(spec["name"], str)):
            raise ValueError("it lacks a job id or a name")
        if not (cluster is None or isinstance(cluster, str)):
            raise ValueError("its cluster is not a name")
        if not math.isfinite(record["submitted"]):
            raise ValueError("it does not say when it was submitted")
        identity = {key: str(value) for key, value in dict(record.get("identity") or {}).items()}
        known = {"job": label, "cluster": cluster, "identity": identity, "spec": spec}
        return {**record, **known, "submitted": float(record["submitted"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{File.SPEC} can't be read: {why(error)}."
        raise RunDirError(
            f"Reading the run directory {path}:", found, "give a folder that a submission has made"
        ) from error


def is_label(text: str) -> bool:
    """Return whether a text is a job as squeue shows it: 12, or 12_3 for an array task."""
    return re.fullmatch(r"\d{1,12}(_\d{1,12})?", text, re.ASCII) is not None


def is_on_slurm(path: Path, label: str) -> bool:
    """Return whether Slurm runs the job of a run directory: it is an array's task, or has a batch script."""
    return "_" in label or (path / File.BATCH_SCRIPT).exists()


def point_latest(path: Path) -> None:
    """Let runs/latest point at a run directory, unless that is a file, a folder, or a link that we can't replace."""
    latest = path.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        return
    temporary = path.parent / f".{LATEST}.{path.name}.tmp"
    try:
        temporary.symlink_to(path.name)
        temporary.replace(latest)
    except OSError:
        temporary.unlink(missing_ok=True)  # no reason to fail: the job is submitted


def remove(paths: Sequence[Path], made: Path | None) -> None:
    """Remove run directories, and the folders from `made` down (see `prepare`) that are empty then."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    if made is not None:
        for folder, _, _ in sorted(os.walk(made), reverse=True):
            try:
                Path(folder).rmdir()
            except OSError:
                break


def _error(path: Path, found: str) -> RunDirError:
    return RunDirError(f"Writing run directories into {path}:", f"{found}.", "choose another folder: --runs-dir PATH")
