"""How far submitted jobs are: Slurm's word on each, and the last figures in its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.errors import JobError, RunDirError, SlurmError
from cluster_ddp.launch import run_folder
from cluster_ddp.launch.schedulers import Scheduler
from cluster_ddp.launch.schedulers.local import ThisMachine
from cluster_ddp.launch.schedulers.slurm import Slurm
from cluster_ddp.slurm.commands import JobStatus

_METRICS = "metrics.jsonl"
# Enough of its end for the last line of each kind.
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One job's, or one array task's. None where it isn't known (yet)."""

    job: str
    """As squeue shows it."""
    name: str
    """The job's."""
    state: str
    """As squeue has it; "unknown" once Slurm has forgotten the job."""
    reason: str | None = None
    """Why it waits."""
    elapsed: str | None = None
    """Since its last start."""
    restarts: int | None = None
    """How often it was started again."""
    epoch: int | None = None
    """The last one of which there is a figure."""
    accuracy: float | None = None
    """On the test set, after the last epoch: 0 to 1."""
    samples_per_s: float | None = None
    """Training samples per second, over all ranks, by the last line of training."""
    run_dir: Path | None = None
    """Its run directory."""


def standings(runs_dir: Path, asked: Sequence[str]) -> list[Standing]:
    """How far jobs are.

    Args:
        runs_dir: folder of the run folders.
        asked: job ids (12; 12_3; the id of an array means its tasks) or run folders; none for all in `runs_dir`.

    Returns:
        In the order of submission.

    Raises:
        JobError: neither a run folder nor Slurm knows one of them.
    """
    known: dict[str, dict[str, JobStatus]] = {}
    found: dict[str, Standing] = {}
    for word in asked or [""]:
        is_folder = bool(word) and Path(word, run_folder.SPEC_FILE).exists()
        label = run_folder.read(Path(word))["job"] if is_folder else word
        folders = _folders(Path(word).resolve().parent if is_folder else runs_dir)
        chosen = {path: record for path, record in folders.items() if not label or _is_meant(label, record)}
        standing = [_standing(path, record, known) for path, record in chosen.items()]
        if label and not standing:
            standing = _without_folder(label, runs_dir)
        found |= {one.job: one for one in standing}
    return list(found.values())


def _folders(runs_dir: Path) -> dict[Path, dict[str, Any]]:
    """The run folders with what their spec.json says, in the order of submission; whole arrays' are left out."""
    folders = {}
    for path in runs_dir.glob(f"*/{run_folder.SPEC_FILE}"):
        if path.parent.is_symlink():
            continue
        try:
            record = run_folder.read(path.parent)
        except RunDirError:
            continue  # being made, or not ours
        if record["spec"].get("array") is None or "_" in record["job"]:
            folders[path.parent] = record
    return dict(sorted(folders.items(), key=lambda item: (item[1]["submitted"], _numbers(item[1]["job"]))))


def _numbers(label: str) -> list[int]:
    return [int(part) for part in label.split("_") if part.isdigit()]


def _is_meant(label: str, record: Mapping[str, Any]) -> bool:
    return label in (record["job"], record["job"].partition("_")[0])


def _standing(folder: Path, record: Mapping[str, Any], known: dict[str, dict[str, JobStatus]]) -> Standing:
    figures = _figures(folder / _METRICS)
    status = _status(folder, record, known)
    done = figures.pop("done", False)
    if status is None:
        state = "COMPLETED" if done else "unknown"
        return Standing(job=record["job"], name=record["spec"]["name"], state=state, run_dir=folder, **figures)
    return Standing(job=record["job"], name=record["spec"]["name"], run_dir=folder, **_of(status), **figures)


def _of(status: JobStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "reason": status.reason if status.state == "PENDING" and status.reason != "None" else None,
        "elapsed": status.elapsed or None,
        "restarts": status.restarts,
    }


def _status(folder: Path, record: Mapping[str, Any], known: dict[str, dict[str, JobStatus]]) -> JobStatus | None:
    """Slurm's word; asked once for a whole array. None if nobody knows the job any more."""
    label = record["job"].partition("_")[0]
    scheduler: Scheduler = (
        Slurm() if folder.joinpath(Slurm.script_name).exists() or "_" in record["job"] else ThisMachine()
    )
    if label not in known:
        try:
            statuses = scheduler.statuses(label, record.get("cluster"), folder)
        except SlurmError:
            statuses = []
        known[label] = {status.array_task or "": status for status in statuses}
    tasks = known[label]
    task = record["job"].partition("_")[2]
    # Those that wait are one record, under a name such as "3-7%4".
    return tasks.get(task) or next((one for name, one in tasks.items() if not name.isdigit()), None)


def _without_folder(word: str, runs_dir: Path) -> list[Standing]:
    try:
        statuses = Slurm().statuses(word, None, runs_dir)
    except SlurmError as error:
        found = f"there is no run folder of it in {runs_dir}, and Slurm says: {error.found}"
        raise JobError(
            f"The standing of {word}:", found, "give a job id or a run folder, and --runs-dir if it is elsewhere"
        ) from error
    return [
        Standing(job=f"{word.partition('_')[0]}_{one.array_task}" if one.array_task else word, name="-", **_of(one))
        for one in statuses
    ]


def _figures(path: Path) -> dict[str, Any]:
    """The last epoch, accuracy and throughput in a metrics.jsonl; those that are in it."""
    figures: dict[str, Any] = {}
    for line in _tail(path):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the first line of the tail may be cut, the last half written
        if not isinstance(record, dict):
            continue
        if record.get("kind") == "train":
            figures |= {"epoch": record.get("epoch"), "samples_per_s": record.get("samples_per_s")}
        elif record.get("kind") == "test":
            figures |= {"epoch": record.get("epoch"), "accuracy": record.get("accuracy")}
        figures["done"] = record.get("kind") == "done"
    return figures


def _tail(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
