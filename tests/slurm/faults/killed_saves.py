"""A training that is killed with SIGKILL, all ranks at once, in the middle of its saves: FOLDER KILLS.

Runs under srun. Each task forks its rank anew for every start, so that a start costs no import of torch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import few_digits
import torch

from cluster_ddp.mnist import training
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.runtime.checkpoint import checkpoint_file

FOLDER, KILLS = Path(sys.argv[1]), int(sys.argv[2])
IS_FIRST = os.environ["SLURM_PROCID"] == "0"
few_digits.use()
torch.optim.SGD([torch.zeros(1)])  # imports what it needs


def train(start: int) -> None:
    os.environ["SLURM_RESTART_COUNT"] = str(start)
    options = {"epochs": 2, "batch_size": 9, "checkpoint_every": "1steps", "run_dir": FOLDER, "test_batch_size": 45}
    training.run(TrainConfig(dataset="digits", **options))  # type: ignore[arg-type]


def fork(start: int) -> int:
    if child := os.fork():
        return child
    try:
        train(start)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def wait_for_a_save() -> None:
    """Until a temporary file is there that was not before, and a random moment longer."""
    before = set(FOLDER.glob("checkpoints/.step-*.tmp"))
    deadline = time.monotonic() + 300
    while not set(FOLDER.glob("checkpoints/.step-*.tmp")) - before:
        assert time.monotonic() < deadline, "no save came"
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.1))


FOLDER.mkdir(exist_ok=True)
for start in range(KILLS):
    child, word = fork(start), FOLDER / f"kill-{start}"
    if IS_FIRST:
        wait_for_a_save()
        word.touch()
    while not word.exists():
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if IS_FIRST:
        for path in FOLDER.glob("checkpoints/*.pt"):
            checkpoint_file.digest(path)  # raises if it is not whole
_, status = os.waitpid(fork(KILLS), 0)
sys.exit(os.waitstatus_to_exitcode(status))
