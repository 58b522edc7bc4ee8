"""What recovery.py disturbs: a small training that notes when rank 0 has completed a step: `python … STEPS_FILE`."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import cluster_ddp

STEP_S = 0.1

with cluster_ddp.distributed() as world:
    torch.manual_seed(0)
    model = world.wrap(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint = cluster_ddp.Checkpointer(world, every="10steps", model=model, optimizer=optimizer)
    for _ in checkpoint.until(1_000_000):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_S)
        checkpoint.step()
        if world.is_main:
            with open(sys.argv[1], "a") as file:
                file.write(json.dumps({"time": time.time(), "process": os.getpid(), "step": checkpoint.steps}) + "\n")
