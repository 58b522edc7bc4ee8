"""starts.jsonl: when the training started, from which step, why the start before ended, and what was lost by that.

It is never cut back, as metrics.jsonl is when a training resumes.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_ddp.agent import first_failure
from cluster_ddp.run import journal, outcome
from cluster_ddp.run.files import json_lines, tail
from cluster_ddp.run.names import ASIDE, RECORDS_VERSION, RESTART, File
from cluster_ddp.run.outcome import Outcome
from cluster_ddp.runtime.run_dir.fenced_writes import append
from cluster_ddp.slurm.topology import Topology

_UNKNOWN = "It ended without a final record: it was killed, or its node was lost."
_SILENT = "It ended without a final record, and Slurm has none either: its first node, {}, was probably lost."
_ENDED = {
    "STOPPED": "It was stopped in time.",
    "CANCELLED": "It was cancelled.",
    "TIMEOUT": "It reached its time limit.",
}
_RESTART = re.compile(rf"^{RESTART}\d+ of job \d+\.$", flags=re.MULTILINE)


def note_start(
    run_dir: Path,
    topology: Topology,
    *,
    step: int,
    saved_s: float | None,
    seen_s: float | None,
    key: str | None = None,
) -> None:
    """Append a "start" record. Call it on rank 0. If it can't be written, nothing is said: no training needs it.

    Args:
        run_dir: the run directory.
        topology: of the ranks.
        step: number of steps that are done.
        saved_s: when the checkpoint that it resumes from was saved, in seconds of UNIX time; None without one.
        seen_s: when the start before was last seen alive; None if unknown.
        key: of the run.
    """
    before = [one for one in json_lines(run_dir / File.STARTS) if one.get("kind") in ("start", "end")]
    if topology.restart_count and before and before[-1].get("state") == "COMPLETED":
        del before[-1]  # started again all the same: after its end it failed, such as to write what was left
    record: dict[str, Any] = {"restart": topology.restart_count, "job": topology.job_label or "", "step": step}
    record |= {} if topology.start_id is None else {"start_id": topology.start_id}
    record |= {} if key is None else {"run": key}
    record |= {"ranks": topology.world_size, "nodes": topology.num_nodes, "master_addr": topology.master_addr}
    if before:
        last = before[-1]
        record["cause"] = last.get("why") or _cause(run_dir, topology, last)
        began_s = max((one.get("time", 0.0) for one in before if one.get("kind") == "start"), default=0.0)
        since_s = max(saved_s or 0.0, began_s)  # what an earlier start lost is in that one's record
        if last.get("saved"):
            record["lost_s"] = 0.0
        elif seen_s is not None and since_s and (lost_s := round(min(seen_s, time.time()) - since_s, 1)) > 0:
            record["lost_s"] = lost_s  # else unknown: it was seen alive only now and then
    _append(run_dir, {"kind": "start", "version": RECORDS_VERSION, **record})


def last_start(run_dir: Path) -> dict[str, Any]:
    """Return the last "start" record; empty without one."""
    with contextlib.suppress(OSError):
        starts = [one for one in json_lines(run_dir / File.STARTS) if one.get("kind") == "start"]
        return starts[-1] if starts else {}
    return {}


def _cause(run_dir: Path, topology: Topology, last: Mapping[str, Any]) -> str:
    """Why the start before ended: by the record of it, or else by what Slurm says in the job's log, or by silence."""
    label = topology.job_label or ""
    is_same_job = last.get("job", label) == label
    folder = run_dir if is_same_job else run_dir / ASIDE.format(last.get("job"))
    of_that = label if is_same_job else str(last.get("job"))
    before, restart = topology.restart_count - 1, last.get("restart")
    if ended := journal.last_end(run_dir, of_that):
        is_older = isinstance(restart, int) and ended.start < restart
        if ended.start == before if is_same_job else not is_older:
            return _in_words(ended)
    log = tail(folder / File.JOB_LOG)
    starts = _RESTART.split(log)
    of_start = starts[-2 if is_same_job and topology.restart_count and len(starts) > 1 else -1]
    if lost := first_failure.lost_nodes(of_start):
        return f"{outcome.in_words(lost)}."
    # Slurm says in the log why it ends a batch script, unless the node of that script is gone.
    is_silent = log and is_same_job and restart == before and "CANCELLED AT" not in of_start
    return _SILENT.format(last.get("master_addr", "")) if is_silent else _UNKNOWN


def _in_words(ended: Outcome) -> str:
    if not ended.failure:
        return _ENDED.get(ended.state, f"It ended with status {ended.status}.")
    is_only_lost = ended.failure == outcome.in_words(ended.lost_nodes)
    return f"{ended.failure}." if is_only_lost else f"Failed first: {ended.failure}"


def note_end(run_dir: Path, why: str, *, state: str, saved: bool) -> None:
    """Append an "end" record with a state of `names.ENDS`; `saved` if a checkpoint has all that was done."""
    _append(run_dir, {"kind": "end", "state": state, "why": why, "saved": saved})


def note_non_finite(run_dir: Path, step: int, what: str) -> None:
    """Append a "non_finite" record of the first step of this start whose state was not saved, and where that is."""
    _append(run_dir, {"kind": "non_finite", "step": step, "what": what})


def _append(run_dir: Path, record: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        append(run_dir / File.STARTS, json.dumps({"time": round(time.time(), 3), **record}).encode() + b"\n")
