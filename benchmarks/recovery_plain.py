"""The training of recovery_training.py in plain torch, as users of torchrun write it: `python … STEPS_FILE`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_training import STEP_S, STEPS_PER_SAVE


def main(steps: str) -> None:
    """Train for ever."""
    dist.init_process_group("gloo")
    Path(f"{steps}.{socket.gethostname()}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, done = Path(f"{steps}.pt"), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["steps"]
    for step in itertools.count(done + 1):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_S)
        if dist.get_rank() == 0:
            if step % STEPS_PER_SAVE == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            with open(steps, "a") as file:
                file.write(json.dumps({"time": time.time(), "process": os.getpid(), "step": step}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
