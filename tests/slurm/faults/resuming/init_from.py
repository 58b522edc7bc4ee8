"""A training that resumes in nanoGPT's form: `--init_from=resume` reads out_dir/ckpt.pt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

settings = {"init_from": "scratch", "out_dir": "out", "max_iters": "8"}
settings.update(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
path, rank = Path(settings["out_dir"]) / "ckpt.pt", int(os.environ.get("RANK", -1))

torch.manual_seed(1337)
model, iteration = torch.nn.Linear(4, 1), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if settings["init_from"] == "resume":
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iteration = checkpoint["iter_num"]
if rank != -1:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
raw_model = model.module if rank != -1 else model
print(f"from iteration {iteration}")
while iteration < int(settings["max_iters"]):
    if rank <= 0 and iteration % 4 == 0:
        path.parent.mkdir(exist_ok=True)
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iteration}
        torch.save(state, path)
    if iteration == 6 and settings["init_from"] == "scratch":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad(set_to_none=True)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    iteration += 1
print(f"done at iteration {iteration}")
