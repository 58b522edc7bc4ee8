"""A training that resumes in timm's form: `--resume PATH` reads a checkpoint, whose next epoch comes first."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--resume", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(42)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start_epoch = 0
if args.resume:
    checkpoint = torch.load(args.resume)
    model.module.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start_epoch = checkpoint["epoch"] + 1
print(f"from epoch {start_epoch}", flush=True)
for epoch in range(start_epoch, 3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        args.output.mkdir(exist_ok=True)
        state = {"epoch": epoch, "state_dict": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.output / "last.pth.tar")
    dist.barrier()
    if epoch == 1 and not args.resume and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"done after epoch {epoch}", flush=True)
dist.destroy_process_group()
