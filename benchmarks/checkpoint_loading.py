"""How much memory loading a checkpoint takes: `python benchmarks/checkpoint_loading.py [--gib 2] [--rounds 3]`.

One process saves a model and its optimizer, others load them: with Adam, and with SGD, which has no state. The peak of
each process is the kernel's (ru_maxrss), pages of the mapped file included.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from record import Figure, report

import cluster_ddp
from cluster_ddp.runtime.run_dir.run_dir import RunDir

AT_MOST = 1.6
LAYERS = 8
GIB = 1 << 30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="size of model and optimizer state, in 2**30 bytes")
    parser.add_argument("--rounds", type=int, default=3, help="how often to load it (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--one", choices=("Adam", "SGD"), help=argparse.SUPPRESS)  # a process that saves or loads
    options = parser.parse_args()
    if options.one:
        one(options.folder, options.gib, options.one)
    else:
        report(*(figure for name in ("Adam", "SGD") for figure in figures(name, options)))


def figures(name: str, options: argparse.Namespace) -> list[Figure]:
    """The figures for an optimizer that has a state (Adam), or none (SGD)."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, __file__, f"--one={name}", f"--gib={options.gib}", f"--folder={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(options.rounds)]
    rounds = [tuple(map(float, one.stdout.splitlines()[-1].split())) for one in done]
    what = f"model and {name}'s state, {options.gib:g} GiB"
    return [
        Figure(what=f"{what}: peak for loading it", values=[load for _, load in rounds], unit="x", at_most=AT_MOST),
        Figure(what="… with the model and its gradients", values=[peak for peak, _ in rounds], unit="x"),
    ]


def one(folder: Path, gib: float, name: str) -> None:
    """Save if the folder has no checkpoint; else load it and print both peaks, in multiples of the state's size."""
    logging.getLogger("cluster_ddp").setLevel(logging.ERROR)
    with cluster_ddp.distributed(cuda=False) as world:
        empty = peak_bytes()
        width = round((gib * GIB / 4 / (3 if name == "Adam" else 1) / LAYERS) ** 0.5)
        model = world.wrap(torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))))
        optimizer = getattr(torch.optim, name)(model.parameters())
        is_saved, before = (folder / "checkpoints").exists(), peak_bytes()
        checkpoint = cluster_ddp.Checkpointer(
            world, run_dir=RunDir(folder, world), every="1steps", model=model, optimizer=optimizer
        )
        if is_saved:
            print((peak_bytes() - empty) / (gib * GIB), (peak_bytes() - before) / (gib * GIB))
            return
        for _ in checkpoint.until(1):
            model(torch.rand(1, width)).sum().backward()
            optimizer.step()
            checkpoint.step()


def peak_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
