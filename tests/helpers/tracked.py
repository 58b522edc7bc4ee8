"""What trackers have written in a run directory, read by each library's own reader, and what they should have."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster_ddp.runtime.run_dir.trackers import MetricPoint

Values = dict[str, list[tuple[int, float]]]
"""Steps and values of each tag, in order."""


def truth(run_dir: Path) -> Values:
    """What metrics.jsonl says."""
    found: Values = {}
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text().splitlines()):
        point = MetricPoint.of(json.loads(line), number)
        for tag, value in point.values.items():
            found.setdefault(tag, []).append((point.step, value))
    return found


def of_tensorboard(run_dir: Path) -> tuple[str, Values]:
    """By the reader that TensorBoard itself uses for a folder: it drops what a later START says to purge."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "trackers" / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    tags = read.Tags()["scalars"]
    return "", {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}


def of_wandb(run_dir: Path) -> tuple[str, Values]:
    """All offline runs that `wandb sync` would upload: one. Records are W&B's own protocol buffers."""
    (folder,) = (run_dir / "trackers" / "wandb" / "wandb").glob("offline-run-*")
    (path,) = folder.glob("*.wandb")
    run_id, found = "", Values()
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "run":
            run_id = record.run.run_id
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            for tag in row.keys() - {"global_step"}:
                if not tag.startswith("_"):
                    found.setdefault(tag, []).append((row["global_step"], row[tag]))
    return run_id, found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, LevelDB's log format behind seven bytes; of one that is torn, the whole ones.

    wandb 0.31 has no reader in Python any more: its own is part of the program that uploads.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, bytearray()
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0 or at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(bytes(parts))
            parts.clear()
            yield record


def of_mlflow(run_dir: Path) -> tuple[str, Values]:
    """By MLflow's client, of the store of files."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run_dir / "trackers" / "mlflow").absolute().as_uri())
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    histories = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    return run.info.run_id, {tag: [(one.step, one.value) for one in all_] for tag, all_ in histories.items()}


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
