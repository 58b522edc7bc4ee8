"""How long `status` takes with many run directories: `python benchmarks/status_scale.py`, as root.

Slurm has forgotten their jobs. The cluster is a sandbox of its own, without accounting. Each run directory has a
spec.json, a script and a metrics.jsonl of a hundred lines, as a training leaves them. Prints JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Figure, report

from cluster_ddp.run.names import File
from cluster_ddp.sandbox import cluster
from cluster_ddp.submission.spec import JobSpec

AT_MOST_S = 5.0
# Above any id that the sandbox has given.
_FIRST_JOB = 100_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 2000], help="how many jobs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: %(default)s)")
    options = parser.parse_args()
    name = f"status-{os.getpid()}"
    cluster.up(name, nodes=1, gpus_per_node=1)
    try:
        env = {**os.environ, **cluster.environment(name)}
        taken_s = {count: _taken_s(count, options.rounds, env) for count in options.jobs}
    finally:
        cluster.down(name)
    most = max(options.jobs)
    report(
        *(
            Figure(
                what=f"{count} forgotten jobs", values=values, unit="s", at_most=AT_MOST_S if count == most else None
            )
            for count, values in taken_s.items()
        )
    )


def _taken_s(count: int, rounds: int, env: dict[str, str]) -> list[float]:
    """The seconds of each call of `status`."""
    with tempfile.TemporaryDirectory() as folder:
        for job in range(_FIRST_JOB, _FIRST_JOB + count):
            _make_run_dir(Path(folder, "runs", f"fit-{job}"), str(job))
        return [_status_s(folder, count, env) for _ in range(rounds)]


def _make_run_dir(path: Path, job: str) -> None:
    spec = dataclasses.asdict(JobSpec(name="fit", command=("true",)))
    path.mkdir(parents=True)
    (path / File.SPEC).write_text(json.dumps({"job": job, "submitted": time.time(), "spec": spec}))
    (path / "job.sbatch").touch()
    line = {"kind": "train", "epoch": 1, "step": 0, "samples": 64, "loss": 1.0, "lr": 1.0, "samples_per_s": 1000.0}
    (path / "metrics.jsonl").write_text((json.dumps(line) + "\n") * 100)


def _status_s(folder: str, count: int, env: dict[str, str]) -> float:
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "cluster_ddp", "status"]
    done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    taken_s = time.perf_counter() - start_s
    assert done.stdout.count("  fit  ") == count, done.stdout[:1000]
    return taken_s


if __name__ == "__main__":
    main()
