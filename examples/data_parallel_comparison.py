"""DataParallel against DistributedDataParallel, on the GPUs of one machine.

python examples/data_parallel_comparison.py

DataParallel is one process with a thread for each GPU. In every step it copies the model to all GPUs, gathers all
outputs on the first one, and its threads wait for each other at Python's lock. DDP is a process for each GPU that keeps
its model, and adds up gradients while the backward pass runs. It runs over several nodes, too. Use DDP.
"""

import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import cluster_ddp

BATCH_SIZE, STEPS, WIDTH = 256, 50, 2048


def network() -> nn.Module:
    """Enough arithmetic to keep a GPU busy for a moment."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def samples_per_s(model: nn.Module, batch_size: int, device: torch.device) -> float:
    """Train on random numbers; samples of this process a second, after some steps to warm up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batch_size, WIDTH, device=device)
    start_s = 0.0
    for step in range(STEPS):
        if step == 10:
            float(x.sum())  # waits for the GPU
            start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
    float(loss)
    return (STEPS - 10) * batch_size / (time.perf_counter() - start_s)


def main() -> None:
    """Time both, or say why not."""
    gpus = torch.cuda.device_count()
    if "--rank" in sys.argv:  # one of DDP's processes
        with cluster_ddp.distributed() as world:
            mine = samples_per_s(world.wrap(network()), BATCH_SIZE, world.device)
            world.print(f"DistributedDataParallel: {world.sum(mine):.0f} samples/s")
        return
    if gpus < 2:
        print(f"This machine has {gpus} GPUs: two or more are needed to compare. DataParallel does nothing on a CPU.")
        return
    model = nn.DataParallel(network().cuda())
    print(f"DataParallel: {samples_per_s(model, gpus * BATCH_SIZE, torch.device('cuda')):.0f} samples/s", flush=True)
    torchrun = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}")
    subprocess.run([*torchrun, str(Path(__file__).resolve()), "--rank"], check=True)


if __name__ == "__main__":
    main()
