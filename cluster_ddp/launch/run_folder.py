"""The run folders of a submission: runs/<name>-<job id>, and runs/latest, which points at the last one.

    runs/fit-12/            spec.json   what was asked for, by whom, when and where
                            job.sbatch  the script (job.sh on this machine); 12_submitted.pkl where a function runs
                            code/       with --snapshot
                            job.log     what the batch script printed, and Slurm about it
                            task-0.log  what task 0 printed, and so on
                            ended.json  how a job on this machine ended
                            metrics.jsonl, run.json  of a run of cluster_ddp's

An array has such a folder for the whole (script, snapshot) and one for each task: runs/fit-12_0, runs/fit-12_1 …
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError
from cluster_ddp.files import atomic_write
from cluster_ddp.launch.spec import JobSpec

SPEC_FILE = "spec.json"
LATEST = "latest"
JOB_LOG = "job.log"
OUTCOME_FILE = "ended.json"
"""How a job on this machine ended; of others Slurm remembers it."""


def prefix(runs_dir: Path, spec: JobSpec) -> str:
    """The path of the job's run folders up to the job's id."""
    return f"{runs_dir}/{spec.name}-"


def prepare(runs_dir: Path) -> Path | None:
    """Make the folder of all runs, and see that it can be written.

    Returns:
        The topmost folder that had to be made for it; None if all were there.

    Raises:
        RunDirError: it can't be made or written, or has a name that Slurm would change.
    """
    if any(not character.isprintable() or character in "%\\" for character in str(runs_dir)):
        raise _error(runs_dir, "Slurm takes '%' and '\\' in a path for its own, and it can hold no control characters")
    missing = [folder for folder in (runs_dir, *runs_dir.parents) if not folder.exists()]
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error(runs_dir, error.strerror or str(error)) from error
    if not os.access(runs_dir, os.W_OK | os.X_OK):
        raise _error(runs_dir, "permission denied")
    return missing[-1] if missing else None


def create(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a run folder and write its first files.

    Raises:
        RunDirError: it is there already, or can't be written.
    """
    try:
        path.mkdir()
        for name, content in files.items():
            with atomic_write(path / name) as file:
                file.write(content)
    except FileExistsError as error:
        found = "it is there already: a job of another cluster, or of an earlier time, had the same name and id."
        raise RunDirError(f"Making the run folder {path}:", found, "choose another --name or --runs-dir") from error
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from error


def description(
    spec: JobSpec, *, label: str, backend: str, cluster: str | None, command: Sequence[str], values: Mapping[str, str]
) -> bytes:
    """The content of spec.json.

    Args:
        spec: of the whole submission.
        label: the job as squeue shows it, 12 or 12_3.
        backend: what submitted it.
        cluster: which cluster has it, where there are several.
        command: what this job or array task runs; empty for a function.
        values: this array task's values of the grid.
    """
    record = {
        "job": label,
        "backend": backend,
        "cluster": cluster,
        "command": list(command),
        "values": dict(values),
        "submitted": time.time(),
        "folder": str(Path.cwd()),
        "spec": dataclasses.asdict(spec),
    }
    return json.dumps(record, indent=2).encode() + b"\n"


def read(path: Path) -> dict[str, Any]:
    """What `description` wrote into a run folder.

    Raises:
        RunDirError: there is none, or it is damaged.
    """
    try:
        record = json.loads((path / SPEC_FILE).read_text())
        return {
            **record,
            "job": str(record["job"]),
            "spec": dict(record["spec"]),
            "submitted": float(record["submitted"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{SPEC_FILE} can't be read: {error}."
        raise RunDirError(
            f"Looking at the run folder {path}:", found, "name a folder that a submission has made"
        ) from error


def point_latest(path: Path) -> None:
    """Let runs/latest point at a run folder; where something else has that name, or it is another user's, it stays."""
    latest = path.parent / LATEST
    if latest.exists() and not latest.is_symlink():
        return
    temporary = path.parent / f".{LATEST}.{path.name}.tmp"
    try:
        temporary.symlink_to(path.name)
        temporary.replace(latest)
    except OSError:
        temporary.unlink(missing_ok=True)  # the job is submitted: that counts


def remove(paths: Sequence[Path], made: Path | None) -> None:
    """Take back run folders, and the folders above them that `prepare` made, as far as nothing else is in them."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    if made is not None:
        for folder, _, _ in sorted(os.walk(made), reverse=True):
            try:
                Path(folder).rmdir()
            except OSError:
                break


def _error(path: Path, found: str) -> RunDirError:
    return RunDirError(
        f"Writing run folders into {path}:",
        f"{found}.",
        "choose another folder: --runs-dir PATH",
    )
