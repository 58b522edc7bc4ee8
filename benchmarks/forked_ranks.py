"""Many forked ranks on one node: `python benchmarks/forked_ranks.py [--ranks 64] [--rounds 3]`, as root.

A sandbox of its own plays the node. Measured are the time from srun until all ranks have met, and from then until the
batch script ends, which waits for the last of them. Prints JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Figure, report

from cluster_ddp.launch.render import render
from cluster_ddp.launch.spec import JobSpec
from cluster_ddp.sandbox import cluster

MEETS = """import os, pathlib, time
import cluster_ddp
with cluster_ddp.distributed(cuda=False) as world:
    world.barrier()
    if world.rank == 0:
        pathlib.Path(os.environ["CLUSTER_DDP_RUN_DIR"], "met").write_text(str(time.time()))
"""
# Into the batch script, before srun: a file with the time now, and one with the time when the script has ended.
NOTED = """status=0
date +%s.%N >"$CLUSTER_DDP_RUN_DIR/begun"
trap 'date +%s.%N >"$CLUSTER_DDP_RUN_DIR/ended"' EXIT
"""


def main() -> int:
    """Measure, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks on the node (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times that the job runs (default: %(default)s)")
    arguments = parser.parse_args()
    name = f"forked-{os.getpid()}"
    cluster.up(name, nodes=1, gpus_per_node=arguments.ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [seconds(arguments.ranks, name, Path(folder)) for _ in range(arguments.rounds)]
    finally:
        cluster.down(name)
    met, ended = zip(*rounds)
    what = f"{arguments.ranks} forked ranks of one node"
    report(
        Figure(what=f"{what}: from srun until they have met", values=met, unit="s"),
        Figure(what=f"{what}: from then to the job's end", values=ended, unit="s"),
    )
    return 0


def seconds(ranks: int, sandbox: str, folder: Path) -> tuple[float, float]:
    """How long the ranks of one job took to meet, and then to end.

    Raises:
        subprocess.CalledProcessError: the job failed; its output is shown.
    """
    script = folder / "meets.py"
    script.write_text(MEETS)
    spec = JobSpec(
        name="forked",
        command=("env", "OMP_NUM_THREADS=1", sys.executable, str(script)),
        gpus_per_node=ranks,
        time="10",
        launcher="fork",
    )
    text = render(spec, source="", run_prefix=f"{folder}/forked-").replace("status=0\n", NOTED, 1)
    env = {
        **cluster.environment(sandbox),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = ["sbatch", "--parsable", "--wait", f"--output={folder}/%x-%j.log"]
    done = subprocess.run(command, input=text, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, *(log.read_text() for log in folder.rglob("*.log")), sep="\n", file=sys.stderr)
    done.check_returncode()
    run_dir = folder / f"forked-{done.stdout.strip().split(';')[0]}"
    begun, met, ended = (float((run_dir / moment).read_text()) for moment in ("begun", "met", "ended"))
    return met - begun, ended - met


if __name__ == "__main__":
    sys.exit(main())
