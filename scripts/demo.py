"""`make demo`: train the MNIST CNN on what this machine has, and print its test accuracy.

If this machine has Slurm, it submits jobs/mnist_2node.sbatch and follows the job. With --slurm sandbox it starts its
own Slurm for that. Otherwise it trains with two ranks here. It uses MNIST if the files are here or can be fetched
within seconds, else digits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cluster_ddp.errors import DataError, SlurmError, counted, exit_on_error
from cluster_ddp.mnist import data
from cluster_ddp.run.files import make_dir
from cluster_ddp.run.names import File
from cluster_ddp.sandbox import cluster, prerequisites
from cluster_ddp.slurm import commands, job_status

SANDBOX_NAME = "demo"
DATA_DIR = Path("data")
JOB = Path("jobs/mnist_2node.sbatch")
# About a minute on two cores. digits has 40 times fewer samples.
EPOCHS = {"mnist": 1, "digits": 8}


def main() -> int:
    """Find data, find somewhere to train, train. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slurm", choices=["", "sandbox"], default="", help="sandbox: start one and train there")
    parser.add_argument("--mnist-from", default="", help="a folder that may hold MNIST's files")
    options = parser.parse_args()
    with exit_on_error("make demo"):
        dataset = _dataset(options.mnist_from)
        arguments = ["--dataset", dataset, "--epochs", str(EPOCHS[dataset]), "--log-interval", "100"]
        if options.slurm == "sandbox":
            return _on_sandbox(arguments)
        if _slurm_answers():
            return _on_slurm(arguments, os.environ)
        return _on_this_machine(arguments)


def _slurm_answers() -> bool:
    """Whether Slurm's commands are installed and a controller answers within 10 s."""
    try:
        commands.run(["sinfo", "--noheader"], timeout_s=10)
    except SlurmError:
        return False
    return True


def _dataset(mnist_from: str) -> str:
    """mnist if its files are here, or can be fetched from a folder or the internet; else digits."""
    source = ["--from", mnist_from] if mnist_from else ["--timeout-s", "5", "--retries", "0"]
    try:
        data.check(DATA_DIR)
        return "mnist"
    except DataError:
        print(f"MNIST is not in {DATA_DIR}/ yet; trying to fetch it …", flush=True)
    command = [sys.executable, "scripts/download_data.py", "--data-dir", str(DATA_DIR), *source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        print(f"MNIST is in {DATA_DIR}/ now.", flush=True)
        return "mnist"
    if mnist_from and done is not None:
        print(done.stderr, end="")
    print("MNIST can't be fetched here, so this demo trains on the package's 1,797 digits.")
    print("  To fetch it, with internet: python scripts/download_data.py")
    print("  Without, copy its four files here from elsewhere: make demo MNIST_FROM=FOLDER,")
    print("  or, for all trainings: python scripts/download_data.py --from FOLDER", flush=True)
    return "digits"


def _on_this_machine(arguments: list[str]) -> int:
    print("No Slurm here (make demo SLURM=sandbox starts one): training with 2 ranks on this machine.")
    run_dir = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)), **os.environ}
    import torch

    if torch.cuda.device_count() == 1:
        arguments = [*arguments, "--no-cuda"]  # two ranks don't share a GPU
    # Not torchrun: it waits for minutes on a machine that does not know its own name.
    launch = [sys.executable, "-m", "cluster_ddp", "launch", "--ranks", "2", "--"]
    training = [sys.executable, "-m", "cluster_ddp.train", *arguments, "--run-dir", str(run_dir)]
    status = subprocess.run([*launch, *training], env=env).returncode
    return status or _report(run_dir)


def _on_sandbox(arguments: list[str]) -> int:
    prerequisites.install()
    cluster.down(SANDBOX_NAME)  # what a killed demo may have left
    layout = cluster.up(SANDBOX_NAME, nodes=2, gpus_per_node=2)
    size = f"{layout.nodes} nodes with {layout.gpus_per_node} GPUs each"
    print(f"A sandbox of {size} is up. (It checked its nodes with a job of its own, so the demo's is not job 1.)")
    try:
        # The sandbox's GPUs are dummies, whatever the machine has.
        return _on_slurm([*arguments, "--no-cuda"], cluster.environment(SANDBOX_NAME))
    finally:
        cluster.down(SANDBOX_NAME)
        print("The sandbox is gone again.")


def _on_slurm(arguments: list[str], env: Mapping[str, str]) -> int:
    """Submit the job and print its output as it comes, until it has ended."""
    run_dir = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    make_dir(run_dir)
    # Not into the script's own %x-%j.out: each sandbox counts from 1, and the last demo's file would have that name.
    output = f"--output={run_dir}/{File.JOB_LOG}"
    words = [*arguments, "--run-dir", str(run_dir)]
    job_id = commands.submit(JOB, options=[output], arguments=words, env=env).job_id
    print(f"sbatch {JOB}: job {job_id}", flush=True)
    shown, reason = 0, ""
    while True:
        status = job_status.job_statuses(job_id, env=env)[0]
        if status.state == "PENDING" and status.reason not in ("None", reason):
            reason = status.reason
            print(f"waiting: {reason}", flush=True)
        if (log := Path(status.stdout)).exists():
            with open(log, errors="replace") as file:
                file.seek(shown)
                print(file.read(), end="", flush=True)
                shown = file.tell()
        if status.ended:
            break
        time.sleep(0.5)
    if status.state != "COMPLETED":
        print(f"job {job_id} ended as {status.state}; its output: {status.stdout}", file=sys.stderr)
        return 1
    return _report(run_dir)


def _report(run_dir: Path) -> int:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "test"][-1]
    ranks = json.loads((run_dir / "run.json").read_text())["topology"]["world_size"]
    print(
        f"\nDone: {counted(ranks, 'rank')}, {counted(last['epoch'], 'epoch')}, "
        f"test accuracy {100 * last['accuracy']:.2f} %. All figures: {run_dir}/metrics.jsonl"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("make demo: interrupted.")
