"""spec.json, the submission of a run directory: what was submitted, by which command, when and where."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.errors import RunDirError
from cluster_ddp.run import job_file
from cluster_ddp.run.files import read_json, why
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.names import ASIDE, File


def raw(path: Path) -> dict[str, Any]:
    """Return the content of spec.json.

    Raises:
        OSError: there is none, or it can't be read.
        ValueError: it is damaged.
    """
    return read_json(path / File.SPEC)


def content(record: Mapping[str, Any]) -> bytes:
    """Return spec.json as it is written."""
    return json.dumps(record, indent=2).encode() + b"\n"


def read(path: Path) -> dict[str, Any]:
    """Read what the spec.json and the job.json of a run directory say. Without a known job, `job` is empty.

    Raises:
        RunDirError: there is no spec.json, or one of them is damaged.
    """
    try:
        record = raw(path)
        identity = {key: str(value) for key, value in dict(record.get("identity") or {}).items()}
        if "job" not in record:
            job = job_file.read(path, record.get("array_task")) or JobFile("", time=float("inf"))
            record |= {"job": job.job, "cluster": job.cluster, "submitted_by": job.time}
            identity |= {"host": job.host, "process": job.process}
        label, cluster, spec = str(record["job"]), record.get("cluster"), dict(record["spec"])
        if not ((not label or is_label(label)) and isinstance(spec["name"], str)):
            raise ValueError("it lacks a job id or a name")
        if not (cluster is None or isinstance(cluster, str)):
            raise ValueError("its cluster is not a name")
        if not math.isfinite(record["submitted"]):
            raise ValueError("it does not say when it was submitted")
        submitted, by = float(record["submitted"]), float(record.get("submitted_by", record["submitted"]))
        known = {"job": label, "cluster": cluster, "identity": identity, "spec": spec}
        return {**record, **known, "submitted": submitted, "submitted_by": by}
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{File.SPEC} can't be read: {why(error)}."
        raise RunDirError(
            f"Reading the run directory {path}:", found, "give a folder that a submission has made"
        ) from error


def of_job(path: Path, label: str) -> tuple[Path, dict[str, Any]] | None:
    """Return where the files of a job that has run in a run directory are, the last one or an earlier one; and `read`.

    Args:
        path: the run directory.
        label: the job's id, as squeue shows it; of an array's task, the array's will do.
    """
    for place in (path, path / ASIDE.format(label)):
        with contextlib.suppress(RunDirError):
            record = read(place)
            if place != path or label in (record["job"], record["job"].partition("_")[0]):
                return place, {**record, "job": label if place != path else record["job"]}
    return None


def holder(record: Mapping[str, Any]) -> str:
    """Return the label of the job that holds the array's task of a record (`read`); empty if none does."""
    number = str(record.get("held_by", ""))
    return f"{record['job'].partition('_')[0]}_{number}" if number.isdecimal() and record["job"] else ""


def is_label(text: str) -> bool:
    """Return whether a text is a job as squeue shows it: 12, or 12_3 for an array task."""
    return re.fullmatch(r"\d{1,12}(_\d{1,12})?", text, re.ASCII) is not None
