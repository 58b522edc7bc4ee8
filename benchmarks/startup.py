"""From srun to the first optimizer step, with each launcher: `python benchmarks/startup.py [--rounds 5]`, as root.

It runs on a sandbox of its own, with two nodes. In each round the launchers start the MNIST training on all ranks, one
after another. The time ends when rank 0 has recorded the mean loss of the first step, which needs all ranks. Prints
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Figure, report

from cluster_ddp.sandbox import cluster
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec

LAUNCHERS = ("srun", "fork")
AT_LEAST_TIMES, AT_MOST_S = 3.0, 4.0


def main() -> int:
    """Measure, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the sandbox (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks on each node (default: %(default)s)")
    parser.add_argument("--launchers", nargs="+", default=LAUNCHERS, help="launchers to start (default: all)")
    arguments = parser.parse_args()
    name = f"startup-{os.getpid()}"
    cluster.up(name, nodes=arguments.nodes, gpus_per_node=arguments.ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [
                {launcher: seconds(launcher, arguments, name, Path(folder)) for launcher in arguments.launchers}
                for _ in range(arguments.rounds)
            ]
    finally:
        cluster.down(name)
    figures = [figure(launcher, rounds, arguments) for launcher in arguments.launchers]
    if "fork" in arguments.launchers:
        values = [one["fork"] for one in rounds]
        figures.append(Figure(what="--launcher fork, in seconds", values=values, unit="s", at_most=AT_MOST_S))
    report(*figures)
    return 0


def seconds(launcher: str, arguments: argparse.Namespace, sandbox: str, folder: Path) -> float:
    """Seconds from srun to the first step of one start.

    Raises:
        subprocess.CalledProcessError: the job failed; its output is shown.
    """
    options = ("--dataset", "digits", "--batch-size", "4", "--dry-run", "--no-cuda")
    spec = JobSpec(
        name=launcher,
        command=("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "cluster_ddp.train", *options),
        nodes=arguments.nodes,
        gpus_per_node=arguments.ranks,
        time="5",
        launcher=launcher,
    )
    asked = agent_options(spec, run_dir=f"{folder}/{launcher}-%j")
    begun = f'run={shlex.quote(f"{folder}/{launcher}")}-$SLURM_JOB_ID; mkdir -p "$run"; date +%s.%N >"$run/begun"'
    script = render(spec, asked, source="").replace("\nexec ", f"\n{begun}\nexec ")

    env = {
        **cluster.environment(sandbox),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = ["sbatch", "--parsable", "--wait", f"--output={folder}/%x-%j.log"]
    done = subprocess.run(command, input=script, env=env, cwd=folder, capture_output=True, text=True)
    run_dir = folder / f"{launcher}-{done.stdout.strip().split(';')[0]}"
    if done.returncode != 0:
        print(done.stderr, *(log.read_text() for log in folder.rglob("*.log")), sep="\n", file=sys.stderr)
    done.check_returncode()
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    first_step: float = next(record["time"] for record in records if record["kind"] == "train")
    return first_step - float((run_dir / "begun").read_text())


def figure(launcher: str, rounds: list[dict[str, float]], arguments: argparse.Namespace) -> Figure:
    """The figure of one launcher, compared with srun."""
    what = f"srun to first step, {arguments.nodes} x {arguments.ranks} ranks, --launcher {launcher}"
    line = Figure(what=what, values=[one[launcher] for one in rounds], unit="s")
    if launcher == "srun" or "srun" not in rounds[0]:
        return line
    ratios = [one["srun"] / one[launcher] for one in rounds]
    target = AT_LEAST_TIMES if launcher == "fork" else None
    return dataclasses.replace(line, ratios=ratios, peer="how many times as fast as srun", at_least=target)


if __name__ == "__main__":
    sys.exit(main())
