"""torch's process group: gloo on CPUs; on GPUs NCCL for what is on the device, and gloo for the rest."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from cluster_ddp.slurm.topology import Topology

log = logging.getLogger("cluster_ddp")

# gloo's threads let go of the last tensors a little after a collective has ended. Where that falls into the end of the
# interpreter, Python aborts the process ("terminate called without an active exception", torch 2.10 to 2.15).
_GLOO_SETTLES_S = 0.1
# What NCCL may take to end after a failure. While a CUDA graph that uses it is alive it never ends.
_ABORT_S = 5.0

before_leaving: list[Callable[[], object]] = []
"""What `leave` calls first, the last one first; see `World.before_leaving`."""


def join(topology: Topology, device: torch.device, store: dist.Store, *, timeout_s: float) -> None:
    """Make the default process group.

    Args:
        topology: this rank's place.
        device: what it computes on.
        store: that all ranks share.
        timeout_s: seconds that a rank waits for the others in a collective.
    """
    before_leaving.clear()
    on_gpu = device.type == "cuda"
    if on_gpu:
        # torch 2.15's own choice for "nccl" (pytorch#192281) lets the compute stream wait for each bucket's all-reduce
        # at once: backward and communication don't overlap. Older ones don't know the variable.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        # After an error of the device the watchdog would end the process within 0.1 s, in the middle of our words and
        # of a checkpoint that is being written. Its time limit stays.
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", "1")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("process_group", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    if on_gpu:
        # NCCL's clock starts when a collective is launched, before we wait for it, and its watchdog ends the process
        # without a word of who hangs: that is for the case that nobody waits.
        assert dist.group.WORLD is not None
        dist.group.WORLD._get_backend(device)._set_default_timeout(timedelta(seconds=2 * timeout_s))


def barrier() -> None:
    """Wait until all ranks are here, on the CPU: over gloo, whatever they compute on.

    gloo's wait ends in time, with an error; NCCL's would block in the device.
    """
    dist.all_reduce(torch.zeros(1))


def leave() -> None:
    """End it together with all other ranks. The device must have done its work."""
    time.sleep(_GLOO_SETTLES_S)
    while before_leaving:
        try:
            before_leaving.pop()()
        except Exception:  # the training's end, and its status, matter more
            log.warning("Before leaving the world:", exc_info=True)
    dist.destroy_process_group()


def abort(device: torch.device) -> bool:
    """End it alone, after a failure.

    Returns:
        Whether it has ended. If not, NCCL waits for what will never come, and so would Python at the process' end.
    """
    if device.type != "cuda":
        dist.destroy_process_group()
        return True
    has_ended = threading.Event()

    def end() -> None:
        with contextlib.suppress(Exception):  # what went wrong was told already
            # The orderly way waits for collectives that a failed rank will never join.
            dist.distributed_c10d._abort_process_group()
            has_ended.set()

    threading.Thread(target=end, daemon=True).start()
    return has_ended.wait(_ABORT_S)
