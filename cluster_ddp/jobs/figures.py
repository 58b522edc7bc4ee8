"""The last figures of a training: what the end of its metrics.jsonl says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cluster_ddp.contract import File, Record

# Enough of the end of metrics.jsonl for the last record of each kind.
_TAIL_BYTES = 64 * 1024


def read(path: Path) -> dict[str, Any]:
    """Return the last `epoch`, `loss`, `accuracy` and `samples_per_s` of a metrics.jsonl, as far as it has them.

    Also `done`: whether its last record is that of a training that reached its end.
    """
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


def saved_step(run_dir: Path) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    try:
        name = (run_dir / File.PROGRESS).read_text(errors="replace")
    except OSError:
        return None
    match = re.fullmatch(r"step-(\d{1,15})\.pt\s*", name)
    return int(match[1]) if match else None


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
