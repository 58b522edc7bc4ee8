"""The last figures of a training: what the end of its metrics.jsonl says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from cluster_ddp.agent import outcome
from cluster_ddp.agent.outcome import Outcome
from cluster_ddp.jobs.report import usage
from cluster_ddp.protocol import ENDS, File, Record
from cluster_ddp.run_files import json_lines, read_text
from cluster_ddp.submission.notation import hours

# Enough of the end of metrics.jsonl for the last record of each kind.
_TAIL_BYTES = 64 * 1024


def read(path: Path) -> dict[str, Any]:
    """Return the last `epoch`, `progress`, `loss`, `accuracy`, `samples_per_s` of a metrics.jsonl, if it has them."""
    figures: dict[str, Any] = {}
    for record in _tail(path):
        for name in ("epoch", "progress", "samples_per_s", "loss", "accuracy"):
            if name in record and (name != "accuracy" or record.get("kind") != Record.TRAIN):
                value = _number(record[name])
                figures[name] = int(value) if name == "epoch" and value is not None else value
    return figures


def how_ended(run_dir: Path) -> str | None:
    """Return how a training ended, as its records say: one of `protocol.ENDS`, or what else its job's agent says.

    Returns:
        None if it has not ended, or was killed with its job's agent.
    """
    records = [one for one in json_lines(run_dir / File.STARTS) if one.get("kind") in ("start", "end")]
    if records and (state := records[-1].get("state")) in ENDS:
        return str(state)
    if any([one.get("kind") == Record.DONE for one in _tail(run_dir / File.METRICS)][-1:]):
        return "COMPLETED"
    began_s = _number(records[-1].get("time")) or 0.0 if records else 0.0
    ended = outcome_of(run_dir)
    return None if ended is None or ended.requeued or ended.time < began_s else ended.state


def outcome_of(run_dir: Path) -> Outcome | None:
    """Return how a start of the run's job ended, the last that has; None if that is not known, or is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return outcome.read(run_dir)
    return None


def saved_step(run_dir: Path) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    try:
        name = read_text(run_dir / File.PROGRESS)
    except OSError:
        return None
    match = re.fullmatch(r"step-(\d{1,15})\.pt\s*", name)
    return int(match[1]) if match else None


def non_finite_step(run_dir: Path) -> int | None:
    """Return the step at which the last start of a run found NaN or Inf in its weights; None if it found none.

    None also if a later state was saved: then it is finite again.
    """
    step = None
    for record in json_lines(run_dir / File.STARTS):
        if record.get("kind") in ("start", "non_finite"):
            step = record["step"] if record["kind"] == "non_finite" and isinstance(record.get("step"), int) else None
    return None if step is None or step <= (saved_step(run_dir) or 0) else step


def _number(value: object) -> float | None:
    """A number that fits the table; None for anything else, such as NaN."""
    return value if isinstance(value, (int, float)) and abs(value) < 1e12 else None


def line(run_dir: Path) -> str:
    """Return how far a training is and how well it runs, as one line; empty if nothing is known."""
    known, parts = read(run_dir / File.METRICS), []
    if known.get("epoch") is not None:
        parts.append(f"epoch {known['epoch']}")
    if known.get("progress") is not None:
        parts.append(f"{100 * known['progress']:.0f} % done")
    if (left_s := _left_s(run_dir)) is not None:
        parts.append(f"{hours(left_s)} left")
    if known.get("loss") is not None:
        parts.append(f"loss {known['loss']:.4g}")
    if known.get("accuracy") is not None:
        parts.append(f"accuracy {100 * known['accuracy']:.2f} %")
    if known.get("samples_per_s") is not None:
        parts.append(f"{known['samples_per_s']:,.0f} samples/s")
    return ", ".join([*parts, *usage.newest(run_dir)])


def _left_s(run_dir: Path) -> float | None:
    """Seconds to the end of the training, at its speed since its last start; None if unknown."""
    began_s = max((_number(one.get("time")) or 0.0 for one in json_lines(run_dir / File.STARTS)), default=0.0)
    known = [(_number(one.get("time")), _number(one.get("progress"))) for one in _tail(run_dir / File.METRICS)]
    found = [(time_s, done) for time_s, done in known if time_s is not None and done is not None and time_s >= began_s]
    if len(found) < 2:
        return None
    (first_s, before), (last_s, done) = found[0], found[-1]
    return (1 - done) * (last_s - first_s) / (done - before) if done > before else None


def _tail(path: Path) -> list[dict[str, Any]]:
    return json_lines(path, last_bytes=_TAIL_BYTES)
