"""What agreeing on when to stop costs: `torchrun --nproc-per-node 2 benchmarks/stop_agreement.py [--steps 600]`.

The time in `Checkpoint.step` (nothing is saved) as a share of all the time, over training steps of the MNIST CNN, and
the time from a signal on one rank until all is saved and the process would end. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import cluster_ddp
from cluster_ddp.mnist.model import Net
from cluster_ddp.runtime.metrics import RunDir
from cluster_ddp.runtime.preemption import Stopped


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps to measure")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    arguments = parser.parse_args()
    with cluster_ddp.distributed() as world:
        folder = Path(world.gather(tempfile.mkdtemp() if world.is_main else "")[0])
        model = world.wrap(Net())
        optimizer = torch.optim.Adadelta(model.parameters())
        images = torch.randn(arguments.batch_size, 1, 28, 28, device=world.device)
        labels = torch.zeros(arguments.batch_size, dtype=torch.int64, device=world.device)
        shard = world.shard(torch.utils.data.TensorDataset(images), batch_size=1, shuffle_seed=1)
        checkpoint = cluster_ddp.Checkpoint(
            world, shard=shard, run_dir=RunDir(folder, world), every="never", model=model, optimizer=optimizer
        )

        def step() -> float:
            """One training step; the seconds that agreeing took in it."""
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
            start = time.perf_counter()
            checkpoint.step()
            return time.perf_counter() - start

        for _ in range(50):
            step()
        start = time.perf_counter()
        agreeing = sum(step() for _ in range(arguments.steps))
        taken = time.perf_counter() - start
        signalled = time.perf_counter()
        if world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        stopped_after_s = 0.0
        try:
            while True:
                step()
        except Stopped:
            stopped_after_s = time.perf_counter() - signalled
        shares = world.gather(agreeing / taken)
        result = {
            "ranks": world.world_size,
            "device": str(world.device),
            "steps": arguments.steps,
            "ms_per_step": round(1000 * taken / arguments.steps, 2),
            "share": round(max(shares), 5),
            "stopped_after_s": round(max(world.gather(stopped_after_s)), 2),
            "torch": torch.__version__,
        }
        world.print(json.dumps(result, indent=2))
        if world.is_main:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
