"""What the examples here share: a flag that the stop signals set, and an end that requeues the job.

    flag = StopFlag()
    ...
    if flag.agreed(device):  # after a step, on every rank
        ...  # save
        flag.end()

`cluster_ddp.Checkpointer` does all this. These lines are for libraries that save for themselves.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

REQUEUE = 75  # the exit status at which the batch script requeues its job
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Set by USR1, USR2 (before the time limit) and TERM (preemption). The handler does nothing else."""

    def __init__(self) -> None:
        self.is_set = False
        for number in SIGNALS:
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank's flag is set: the same answer on all ranks. A collective."""
        if not dist.is_initialized():
            return self.is_set
        flag = torch.tensor(int(self.is_set), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    @staticmethod
    def end() -> None:
        """Wait until all ranks are here, and end with the status at which the job is requeued."""
        for number in SIGNALS:  # the launcher sends TERM once the first rank has ended
            signal.signal(number, signal.SIG_IGN)
        if dist.is_initialized():
            dist.barrier()
        sys.exit(REQUEUE)


def run_dir() -> Path:
    """The job's run directory, the same after a requeue; without a job the folder `interop-run`."""
    path = Path(os.environ.get("CLUSTER_DDP_RUN_DIR", "interop-run"))
    path.mkdir(parents=True, exist_ok=True)
    return path
