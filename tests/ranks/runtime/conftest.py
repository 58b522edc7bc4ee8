"""A world of one; no progress of an earlier test."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest
import signal_handlers
import torch

import cluster_ddp
from cluster_ddp.runtime.failure import last_progress

log = logging.getLogger("cluster_ddp")


@pytest.fixture(autouse=True)
def no_progress_before() -> None:
    """A training that an earlier test began in this process would by now hang, and name its last step."""
    last_progress.reset()


@pytest.fixture(scope="module")
def world() -> Iterator[cluster_ddp.World]:
    """A world of one; what making it changes in this process is put back."""
    before, hook, threads = (log.handlers[:], log.propagate, log.level), sys.excepthook, torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, signal_handlers.put_back():
        for name in [name for name in os.environ if name.startswith(("SLURM_", "CLUSTER_DDP_", "RANK", "WORLD_"))]:
            patch.delenv(name)
        with cluster_ddp.distributed(cuda=False) as one:
            yield one
    log.handlers[:], log.propagate, log.level = before
    sys.excepthook = hook
    torch.set_num_threads(threads)
