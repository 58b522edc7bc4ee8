"""The reference training at a walking pace, so that a fault finds it busy, and with faults of its own.

PACE_S     seconds that each step takes longer
FAULTS     JSON: [{"do": "kill", "rank": 1, "step": 30}, …], each done at that step of the job's first start, or of
           the one in "start"; "do" is kill, stop, nan, raise, or wait: for a file go in the run directory, or a signal
           that stops the training
CLOCK_S    JSON: {"node2": 3600}: how far that node's clock is ahead
PATIENCE_S seconds that the last writes are tried for in the end, instead of ten minutes
FSYNC_S    seconds that fsync takes longer, as on a file system that is slow
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import few_digits
import torch

from cluster_ddp.mnist import training
from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.run_dir import background_writer
from cluster_ddp.train import main

PACE_S = float(os.environ.get("PACE_S", "0"))
START = int(os.environ.get("CLUSTER_DDP_START", "0"))
FAULTS = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault.get("start", 0) == START]
FSYNC_S = float(os.environ.get("FSYNC_S", "0"))
CLOCK_S = json.loads(os.environ.get("CLOCK_S", "{}")).get(socket.gethostname(), 0)

checkpoint_step, nll_loss, fsync, clock = Checkpointer.step, training.F.nll_loss, os.fsync, time.time
steps = 0


def due(*what: str) -> str | None:
    rank = int(os.environ["SLURM_PROCID"])
    return next((f["do"] for f in FAULTS if (f["rank"], f["step"]) == (rank, steps) and f["do"] in what), None)


def paced_step(self: Checkpointer) -> None:
    global steps
    steps = self.steps + 1
    if due("raise"):
        raise KeyError(f"no sample {steps}")
    while due("wait") and not (self._stop_flag.is_set() or (Path(os.environ["CLUSTER_DDP_RUN_DIR"]) / "go").exists()):
        time.sleep(0.1)
    fault = due("kill", "stop")
    if fault is not None:
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    checkpoint_step(self)
    time.sleep(PACE_S)


def poisoned_loss(*arguments: torch.Tensor, reduction: str) -> torch.Tensor:
    loss = nll_loss(*arguments, reduction=reduction)
    return loss * float("nan") if due("nan") else loss


def slow_fsync(descriptor: int) -> None:
    time.sleep(FSYNC_S)
    fsync(descriptor)


few_digits.use()
background_writer.PATIENCE_S = float(os.environ.get("PATIENCE_S", background_writer.PATIENCE_S))
Checkpointer.step = paced_step  # type: ignore[method-assign]
training.F.nll_loss = poisoned_loss
os.fsync = slow_fsync  # type: ignore[assignment]
time.time = lambda: clock() + CLOCK_S
process_exit.after(lambda: sys.exit(main()))  # as `python -m cluster_ddp.train` does
