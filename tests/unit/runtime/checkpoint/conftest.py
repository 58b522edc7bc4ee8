"""A world of one for trainings in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest
import signal_handlers
import torch

import cluster_ddp
from cluster_ddp.runtime.checkpoint import stop_agreement
from cluster_ddp.runtime.run_dir import final_flush
from cluster_ddp.runtime.world import World

log = logging.getLogger("cluster_ddp")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
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


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks agree after every step, not only about once a second."""
    monkeypatch.setattr(stop_agreement, "AGREE_EVERY_S", 0.0)
    monkeypatch.setattr(final_flush, "_files", [])  # which the world of all tests would wait for


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, world: World) -> Iterator[pytest.LogCaptureFixture]:
    log.addHandler(caplog.handler)
    yield caplog
    log.removeHandler(caplog.handler)
