"""State and progress of submitted jobs: what Slurm says of each, and the last figures in its run directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File, Record
from cluster_ddp.errors import JobError, RunDirError, SlurmError
from cluster_ddp.launch import run_dirs
from cluster_ddp.launch.backends.local import ThisMachine
from cluster_ddp.launch.backends.slurm import Slurm
from cluster_ddp.slurm import queue
from cluster_ddp.slurm.job_status import JobStatus, remembered_jobs

# Run directories with what their spec.json says.
_Records = dict[Path, dict[str, Any]]
# By cluster and job id: the job, or its array tasks by name.
_Known = dict[tuple[str | None, str], dict[str, JobStatus]]

# Enough of the end of metrics.jsonl for the last record of each kind.
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """State and progress of one job or array task. None stands for what isn't known (yet)."""

    job: str
    """Its id, as squeue shows it."""
    name: str
    """Name of the job; "-" without a run directory."""
    state: str
    """As squeue names it; "unknown" if Slurm has forgotten the job or does not answer."""
    reason: str | None = None
    """Why it waits, if it is PENDING."""
    elapsed: str | None = None
    """Time since its last start, as D-HH:MM:SS or HH:MM:SS."""
    restarts: int | None = None
    """How often it was restarted."""
    epoch: int | None = None
    """Epoch of the last record."""
    loss: float | None = None
    """Loss of the last record that has one."""
    accuracy: float | None = None
    """Accuracy of the last evaluation on the test set: 0 to 1."""
    samples_per_s: float | None = None
    """Training samples per second, over all ranks, in the last training record."""
    run_dir: Path | None = None
    """Its run directory; None if it has none in `runs_dir`."""


def run_statuses(runs_dir: Path, asked: Sequence[str]) -> list[RunStatus]:
    """Look up the state and progress of jobs.

    Args:
        runs_dir: folder of the run directories.
        asked: job ids (12; 12_3; the id of an array means its tasks) or run directories; empty for all in `runs_dir`.

    Returns:
        In the order asked; the tasks of an array, and all jobs of `runs_dir`, in the order of submission.

    Raises:
        JobError: a job has no run directory in `runs_dir`, and Slurm does not know it.
        RunDirError: the spec.json of a run directory that was asked for can't be read.
    """
    folders_in = functools.cache(_folders)
    chosen = [_chosen(word, runs_dir, folders_in) for word in asked or [""]]
    known = _known([record for _, folders in chosen for path, record in folders.items() if _is_slurms(path, record)])
    found: dict[Path | str, RunStatus] = {}  # a job on this machine may have the id of one on Slurm
    for label, folders in chosen:
        of_these = [_run_status(path, record, known) for path, record in folders.items()]
        if label and not of_these:
            of_these = _without_folder(label, runs_dir)
        found |= {one.run_dir or one.job: one for one in of_these}
    return list(found.values())


def _chosen(word: str, runs_dir: Path, folders_in: Callable[[Path], _Records]) -> tuple[str, _Records]:
    """The job id that a word means, and its run directories. An empty word means all of `runs_dir`."""
    is_folder = bool(word) and Path(word, File.SPEC).exists()
    label = run_dirs.read(Path(word))["job"] if is_folder else word
    folders = folders_in(Path(word).resolve().parent if is_folder else runs_dir)
    return label, {path: record for path, record in folders.items() if not label or _is_meant(label, record)}


def _folders(runs_dir: Path) -> _Records:
    """The run directories and their spec.json, in the order of submission, without those of whole arrays."""
    folders = {}
    for path in runs_dir.glob(f"*/{File.SPEC}"):
        if path.parent.is_symlink() or not path.is_file():
            continue
        try:
            record = run_dirs.read(path.parent)
        except RunDirError:
            continue  # just being made, or not made by a submission
        if record["spec"].get("array") is None or "_" in record["job"]:
            folders[path.parent] = record
    return dict(sorted(folders.items(), key=lambda item: (item[1]["submitted"], _numbers(item[1]["job"]))))


def _numbers(label: str) -> list[int]:
    return [int(part) for part in label.split("_") if part.isdigit()]


def _is_meant(label: str, record: Mapping[str, Any]) -> bool:
    return label in (record["job"], _job(record))


def _run_status(folder: Path, record: Mapping[str, Any], known: _Known) -> RunStatus:
    figures = _figures(folder / File.METRICS)
    status = _status(folder, record, known)
    done = figures.pop("done", False)
    if status is None:
        state = "COMPLETED" if done else "unknown"
        return RunStatus(job=record["job"], name=record["spec"]["name"], state=state, run_dir=folder, **figures)
    return RunStatus(job=record["job"], name=record["spec"]["name"], run_dir=folder, **_of(status), **figures)


def _of(status: JobStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "reason": status.reason if status.state == "PENDING" and status.reason != "None" else None,
        "elapsed": status.elapsed or None,
        "restarts": status.restarts,
    }


def _is_slurms(folder: Path, record: Mapping[str, Any]) -> bool:
    return "_" in record["job"] or folder.joinpath(Slurm.script_name).exists()


def _known(records: Iterable[Mapping[str, Any]]) -> _Known:
    """What Slurm says of jobs. Two commands for each cluster: squeue, and sacct for jobs not in the queue."""
    jobs: dict[str | None, set[str]] = {}
    for record in records:
        jobs.setdefault(record["cluster"], set()).add(_job(record))
    known: _Known = {}
    for cluster, asked in jobs.items():
        try:
            found = queue.all_jobs(cluster=cluster)
        except SlurmError:
            found = {}
        found |= remembered_jobs(sorted(asked - found.keys()), cluster=cluster)
        known |= {(cluster, job): {one.array_task or "": one for one in found[job]} for job in asked & found.keys()}
    return known


def _job(record: Mapping[str, Any]) -> str:
    """The job's id; for an array task the array's."""
    return str(record["job"].partition("_")[0])


def _status(folder: Path, record: Mapping[str, Any], known: _Known) -> JobStatus | None:
    """The status that the scheduler knows, if any."""
    if not _is_slurms(folder, record):
        try:
            return ThisMachine().statuses(record["job"], None, folder)[0]
        except (OSError, RunDirError):
            return None
    tasks = known.get((record["cluster"], _job(record)), {})
    task = record["job"].partition("_")[2]
    # Waiting tasks share one record, with a name such as "3-7%4".
    return tasks.get(task) or next((one for name, one in tasks.items() if not name.isdigit()), None)


def _without_folder(word: str, runs_dir: Path) -> list[RunStatus]:
    try:
        statuses = Slurm().statuses(word, None, runs_dir)
    except SlurmError as error:
        found = f"no run directory found in {runs_dir}. Slurm says: {error.found}"
        raise JobError(
            f"Job {word}:", found, "give a job id or a run directory; look in another folder with --runs-dir PATH"
        ) from error
    return [
        RunStatus(job=f"{word.partition('_')[0]}_{one.array_task}" if one.array_task else word, name="-", **_of(one))
        for one in statuses
    ]


def _figures(path: Path) -> dict[str, Any]:
    """The last epoch, loss, accuracy and throughput in a metrics.jsonl, as far as it has them."""
    figures: dict[str, Any] = {}
    for line in _tail(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the first line of the tail may be cut, the last line half written
        if not isinstance(record, dict):
            continue
        for name in ("epoch", "samples_per_s", "loss", "accuracy"):
            if name in record and (name != "accuracy" or record.get("kind") != Record.TRAIN):
                value = _number(record[name])
                figures[name] = int(value) if name == "epoch" and value is not None else value
        figures["done"] = record.get("kind") == Record.DONE
    return figures


def _number(value: object) -> float | None:
    """A number that fits the table; None for anything else, such as NaN."""
    return value if isinstance(value, (int, float)) and abs(value) < 1e12 else None


def _tail(path: Path) -> list[bytes]:
    if not path.is_file():
        return []
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
