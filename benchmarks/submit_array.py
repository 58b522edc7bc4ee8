"""How long submitting a job array takes without Slurm's part, and how much it writes.

    python benchmarks/submit_array.py [--tasks 1000] [--rounds 5]

Commands that answer at once stand in for Slurm's. This package must be installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Figure, report

SECONDS_AT_MOST = 10.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of the array (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of submissions (default: %(default)s)")
    options = parser.parse_args()
    seconds, sizes_mb = zip(*(measure(options.tasks) for _ in range(options.rounds)))
    report(
        Figure(what=f"submitting an array of {options.tasks}", values=seconds, unit="s", at_most=SECONDS_AT_MOST),
        Figure(what="the files of its run directories", values=sizes_mb, unit="MB"),
    )


def measure(tasks: int) -> tuple[float, float]:
    """Submit an array. Returns the seconds, and the megabytes (10**6 bytes) of its files."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        for command, answer in (("sbatch", "echo 12"), ("scontrol", "true")):
            (folder / command).write_text(f"#!/bin/sh\n{answer}\n")
            (folder / command).chmod(0o755)
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        submit = (sys.executable, "-m", "cluster_ddp.submit", "--no-check")
        start_s = time.perf_counter()
        array = ("--array", f"seed=0..{tasks - 1}", "--", "python", "t.py", "{seed}")
        subprocess.run([*submit, *array], cwd=folder, env=env, check=True, capture_output=True)
        taken_s = time.perf_counter() - start_s
        size = sum(path.stat().st_size for path in folder.rglob("runs/**/*") if path.is_file())
    return taken_s, size / 1e6


if __name__ == "__main__":
    main()
