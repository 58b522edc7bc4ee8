"""A training that resumes in the form of PyTorch's multinode.py: it looks for snapshot.pt itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """Runs epochs, each of one step."""

    def __init__(self, model: torch.nn.Module, snapshot_path: Path) -> None:
        self.rank, self.snapshot_path, self.epochs_run = int(os.environ["RANK"]), snapshot_path, 0
        self.found = snapshot_path.exists()
        if self.found:
            snapshot = torch.load(snapshot_path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, max_epochs: int) -> None:
        """Train, and save every second epoch."""
        print(f"from epoch {self.epochs_run}", flush=True)
        for epoch in range(self.epochs_run, max_epochs):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.optimizer.step()
            if self.rank == 0 and epoch % 2 == 0:
                torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.snapshot_path)
            dist.barrier()
            if epoch == 3 and self.rank == 1 and not self.found:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"done after epoch {epoch}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(torch.nn.Linear(4, 1), Path(sys.argv[1])).train(6)
    dist.destroy_process_group()
