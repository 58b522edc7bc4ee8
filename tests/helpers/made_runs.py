"""Run directories with made-up records: of a training on two nodes with two GPUs each."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGAN_S = 1_800_000_000.0
GIB = 1 << 30


def write_lines(path: Path, records: list[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))


def make_run(
    folder: Path,
    *,
    job: str = "12",
    name: str = "resnet",
    values: Mapping[str, str] | None = None,
    rate: float = 1.0,
    epochs: int = 6,
    restarts: bool = False,
    seed: int = 1,
) -> Path:
    """A run of `epochs` epochs of ten minutes, which learns at a rate; with two restarts on request."""
    folder.mkdir(parents=True)
    dice = random.Random(seed)
    spec = {"name": name, "nodes": 2, "gpus_per_node": 2, "gpus_per_task": 1, "time": "0-04:00:00", "mem": "64G"}
    record = {"spec": spec, "job": job, "cluster": None, "submitted": BEGAN_S, "values": values}
    (folder / "spec.json").write_text(json.dumps(record))
    (folder / "job.sbatch").write_text("#!/bin/bash\n")
    description = {"config": {"lr": 0.1 * rate, "batch_size": 64}, "versions": {"torch": "2.10"}, "command": ["t.py"]}
    (folder / "run.json").write_text(json.dumps(description))
    metrics: list[Mapping[str, Any]] = []
    usage: dict[int, list[Mapping[str, Any]]] = {0: [], 1: []}
    for number in range(epochs * 60):
        done, time_s = (number + 1) / 60, BEGAN_S + 10 * (number + 1) + _waited_s(number, epochs, restarts)
        loss = 2.3 * math.exp(-rate * done) + 0.1 + dice.random() / 20
        step_s = 0.2 + dice.random() / 50
        train = {
            "epoch": int(number / 60) + 1,
            "step": number % 60,
            "samples": 500 * (number % 60 + 1),
            "lr": 0.1 * rate,
        }
        metrics.append({"kind": "train", "time": time_s, **train, "loss": loss})
        parts = {"data_s": 0.1 * step_s, "compute_s": 0.6 * step_s, "communication_s": 0.2 * step_s}
        parts |= {"optimizer_s": 0.07 * step_s, "checkpoint_s": 0.03 * step_s}
        ranks = {"rank_s_min": 0.75 * step_s, "rank_s_max": (0.8 + dice.random() / 10) * step_s, "slowest_rank": 2}
        speed = {"samples_per_s": 256 / step_s, "samples_per_s_per_rank": 64 / step_s, "progress": done / epochs}
        metrics.append(
            {
                "kind": "steps",
                "time": time_s,
                "step": 50 * number,
                "steps": 50,
                "step_s": step_s,
                **parts,
                **ranks,
                **speed,
            }
        )
        if number % 60 == 59:
            accuracy = 0.99 - 0.6 * math.exp(-rate * done)
            metrics.append(
                {"kind": "test", "time": time_s, "epoch": int(done), "loss": loss * 1.1, "accuracy": accuracy}
            )
        for node, records in usage.items():
            gpus = [
                {
                    "utilization": 0.7 + dice.random() / 4,
                    "memory": (30 + number / 100) * GIB,
                    "memory_total": 80.0 * GIB,
                    "power_w": 300 + 100 * dice.random(),
                    "temperature_c": 60 + number // 30,
                }
                for _ in range(2)
            ]
            use = {"time": time_s, "seconds": 10.0, "node": f"gpu-{node + 1}", "restart": 0, "cpus": 16, "gpus": gpus}
            use |= {"received_per_s": 30_000_000 * (1 + node), "sent_per_s": 20_000_000 + number}
            records.append({**use, "cpu": 0.3 + dice.random() / 10, "memory": 20 * GIB})
    write_lines(folder / "metrics.jsonl", [*metrics, {"kind": "done", "time": metrics[-1]["time"]}])
    for node, records in usage.items():
        write_lines(folder / f"usage-{node}.jsonl", records)
    write_lines(folder / "starts.jsonl", _starts(epochs, restarts))
    return folder


def _waited_s(number: int, epochs: int, restarts: bool) -> float:
    """Seconds that the job has waited to be started again before a record: after a third, and after two."""
    return 400.0 * (3 * number // (60 * epochs)) if restarts else 0.0


def _starts(epochs: int, restarts: bool) -> list[Mapping[str, Any]]:
    start = {"kind": "start", "version": 1, "job": "12", "ranks": 4, "nodes": 2}
    first = {**start, "time": BEGAN_S, "restart": 0, "step": 0}
    if not restarts:
        return [first]
    third = 200.0 * epochs
    return [
        first,
        {"kind": "end", "time": BEGAN_S + third, "why": "Stopped in time: gpu-1 got USR1.", "saved": True},
        {
            **start,
            "time": BEGAN_S + third + 400,
            "restart": 1,
            "step": 3000,
            "cause": "Stopped in time: gpu-1 got USR1.",
            "lost_s": 0.0,
        },
        {
            **start,
            "time": BEGAN_S + 2 * third + 800,
            "restart": 2,
            "step": 5600,
            "cause": "It ended without a final record: it was killed, or its node was lost.",
            "lost_s": 130.0,
        },
    ]
