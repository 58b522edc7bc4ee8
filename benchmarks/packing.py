"""How long many small trainings take in one job (`submit --pack`), and in a job each: `python benchmarks/packing.py`.

Run it as root: it starts a sandbox of one node with `--slots` GPUs. A training sleeps, since those on one machine would
share its CPUs. `--tasks 8 --seconds 2` is a short version. Prints JSON.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from record import Figure, report

from cluster_ddp.run import journal
from cluster_ddp.sandbox import cluster
from cluster_ddp.slurm import commands

POLL_S = 0.5
TIMES_ARRAY_AT_MOST = 1.1


class Taken(NamedTuple):
    """What was measured of a submission."""

    seconds: float
    """From the call of `submit` to the end of the last task."""
    jobs: int
    """Jobs in the queue at first."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=32, help="number of trainings (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each training (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="GPUs of the node (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each (default: %(default)s)")
    options = parser.parse_args()
    name = f"packing-{os.getpid()}"
    cluster.up(name, nodes=1, gpus_per_node=options.slots)
    try:
        env = {**os.environ, **cluster.environment(name)}
        ways = {"array": (), "packed": ("--pack", str(options.slots), "--jobs", "1")}
        rounds = [{way: measure(options, ways[way], env) for way in ways} for _ in range(options.rounds)]
    finally:
        cluster.down(name)
    report(*figures(rounds, options))


def measure(options: argparse.Namespace, how: tuple[str, ...], env: Mapping[str, str]) -> Taken:
    """Submit the trainings, and wait for the last one."""
    with tempfile.TemporaryDirectory() as folder:
        array = ("--array", f"0-{options.tasks - 1}", "--cpus-per-task", "1", "--mem", "200M", "--time", "5")
        command = (sys.executable, "-m", "cluster_ddp.submit", "--no-check", "--name", "python", *array, *how)
        started_s = time.time()
        training = ("--", sys.executable, "-c", f"import time; time.sleep({options.seconds})")
        done = subprocess.run([*command, *training], cwd=folder, env=env, check=True, capture_output=True, text=True)
        label = re.findall(r"array (\d+)", done.stdout)[0]
        jobs = commands.run(["squeue", "--noheader", "--array", f"--jobs={label}"], env=env).count("\n")
        ends = _ends([Path(folder, "runs", f"python-{label}", str(task)) for task in range(options.tasks)])
    return Taken(max(ends) - started_s, jobs)


def _ends(folders: list[Path]) -> list[float]:
    """When each task ended, by its own record, once all have."""
    while not all(found := [journal.last_end(folder) for folder in folders]):
        time.sleep(POLL_S)
    assert all(one is not None and one.status == 0 for one in found), found
    return [one.time for one in found if one is not None]


def figures(rounds: list[dict[str, Taken]], options: argparse.Namespace) -> list[Figure]:
    """Compare both ways."""
    taken_s = {way: [one[way].seconds for one in rounds] for way in ("array", "packed")}
    least_s = -(-options.tasks // options.slots) * options.seconds
    limit = f"{options.slots} at a time, without a pause: {least_s:g} s"
    ratios = [packed / array for packed, array in zip(taken_s["packed"], taken_s["array"])]
    what = f"{options.tasks} trainings of {options.seconds:g} s on {options.slots} GPUs"
    array = f"an array of {options.tasks} jobs"
    time_s: dict[str, Any] = {"unit": "s", "limit": limit}
    against: dict[str, Any] = {"ratios": ratios, "peer": array, "at_most": TIMES_ARRAY_AT_MOST}
    return [
        Figure(what=f"{what}, {array}", values=taken_s["array"], **time_s),
        Figure(what=f"{what}, --pack {options.slots}", values=taken_s["packed"], **time_s, **against),
        *(
            Figure(what=f"… in the queue, {way}", values=[one[way].jobs for one in rounds], unit="job(s)")
            for way in taken_s
        ),
    ]


if __name__ == "__main__":
    main()
