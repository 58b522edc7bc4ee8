"""Train examples/ddp.py on 1, 2 and 4 ranks: `python benchmarks/ddp_timing.py [--ranks 1 2 4] [--runs 3]`.

Each run is `torchrun --nproc-per-node N examples/ddp.py`. The numbers of ranks alternate, so that a busy moment does
not meet only one of them. Prints a Markdown table of the seconds that all epochs' training took, without the start and
the tests.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[1] / "examples" / "ddp.py"


def main() -> int:
    """Measure, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    rounds = [{ranks: train(ranks) for ranks in options.ranks} for _ in range(options.runs)]
    print(table({ranks: [one[ranks] for one in rounds] for ranks in options.ranks}), hardware(), sep="\n\n")
    return 0


def train(ranks: int) -> tuple[float, float]:
    """Train once.

    Returns:
        The seconds of all epochs' training, and the last accuracy.

    Raises:
        subprocess.CalledProcessError: the training failed; its messages are shown.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CLUSTER_DDP_RUN_DIR": f"{folder}/run"}
        done = subprocess.run(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    epochs = re.findall(r"^epoch \d+: accuracy ([\d.]+), ([\d.]+) s$", done.stdout, re.MULTILINE)
    return sum(float(seconds) for _, seconds in epochs), float(epochs[-1][0])


def table(runs: dict[int, list[tuple[float, float]]]) -> str:
    """The medians, by number of ranks. The speed-up is over the first number."""
    lines = ["| ranks | training (median) | from … to | speed-up | accuracy |", "| --- | --- | --- | --- | --- |"]
    first = statistics.median(seconds for seconds, _ in next(iter(runs.values())))
    for ranks, results in runs.items():
        seconds = sorted(one for one, _ in results)
        median, accuracy = statistics.median(seconds), statistics.median(one for _, one in results)
        spread = f"{seconds[0]:.2f} … {seconds[-1]:.2f}"
        lines.append(f"| {ranks} | {median:.2f} s | {spread} | {first / median:.2f} | {accuracy:.4f} |")
    return "\n".join(lines)


def hardware() -> str:
    """What it ran on, and how busy that was."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = ", ".join(gpus) or f"{len(os.sched_getaffinity(0))} CPU cores, no GPU, a thread for each rank"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{devices}; load average {os.getloadavg()[0]:.1f}; {versions}."


if __name__ == "__main__":
    sys.exit(main())
