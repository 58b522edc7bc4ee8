"""Many forked ranks on one node: `python benchmarks/forked_ranks.py [--ranks 64] [--rounds 3]`.

It runs `cluster-ddp launch --launcher fork`, without Slurm. It measures the time from the start until all ranks
have met, and from then until the last rank has ended. Prints JSON.
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

MEETS = """import pathlib, time
import cluster_ddp
with cluster_ddp.distributed(cuda=False) as world:
    world.barrier()
    if world.rank == 0:
        pathlib.Path("met").write_text(str(time.time()))
"""


def main() -> int:
    """Measure, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks on the node (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of starts (default: %(default)s)")
    arguments = parser.parse_args()
    met, ended = zip(*(seconds(arguments.ranks) for _ in range(arguments.rounds)))
    what = f"{arguments.ranks} forked ranks of one node"
    report(
        Figure(what=f"{what}: from the start until they have met", values=met, unit="s"),
        Figure(what=f"{what}: from then until all have ended", values=ended, unit="s"),
    )
    return 0


def seconds(ranks: int) -> tuple[float, float]:
    """Seconds that the ranks took to meet, and then to end.

    Raises:
        subprocess.CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "meets.py").write_text(MEETS)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        launch = ["-m", "cluster_ddp", "launch", "--launcher", "fork", "--ranks", str(ranks)]
        command = [sys.executable, *launch, "--", sys.executable, "meets.py"]
        begun = time.time()
        subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr, check=True)
        ended = time.time()
        met = float(Path(folder, "met").read_text())
    return met - begun, ended - met


if __name__ == "__main__":
    sys.exit(main())
