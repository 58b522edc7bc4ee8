"""torch's process group: gloo for tensors on the CPU, NCCL for tensors on a GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from cluster_ddp.errors import CommunicatorError, DeviceError, SpecError
from cluster_ddp.runtime.device.interruptible_wait import DeviceTimeoutError
from cluster_ddp.slurm.topology import Topology

log = logging.getLogger("cluster_ddp")

# gloo's threads release the last tensors shortly after a collective has ended. If the interpreter ends meanwhile,
# Python aborts the process ("terminate called without an active exception", torch 2.10 to 2.15).
_GLOO_SETTLES_S = 0.1
# How long NCCL may take to end after a failure. While a CUDA graph uses it, it never ends.
_ABORT_S = 5.0

# What NCCL says of a GPU that two ranks have: before 2.30, and since.
_DUPLICATE = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")

before_leaving: list[Callable[[], object]] = []
"""Functions that `leave` calls first, in reverse order; see `World.before_leaving`."""
_further: list[dist.ProcessGroup] = []
"""Groups of some of the ranks, of `limit`."""
ranks_store: dist.Store | None = None
"""The store that the ranks share, which rank 0 serves; None before they have met, and once they part."""


def join(topology: Topology, device: torch.device, store: dist.Store, *, timeout_s: float) -> None:
    """Make torch's default process group, whose collectives wait `timeout_s` seconds for the others. A collective.

    NCCL's own limit is twice that: the wait of `World.synchronize` ends first.

    Raises:
        DeviceError: two ranks have the same GPU.
    """
    global ranks_store
    ranks_store = store
    before_leaving.clear()
    _further.clear()
    on_gpu = device.type == "cuda"
    if on_gpu:
        # torch 2.15's own choice for "nccl" (pytorch#192281) lets the compute stream wait for each bucket's all-reduce
        # at once: backward and communication don't overlap. Older ones don't know the variable.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        # After an error of the device the watchdog would end the process within 0.1 s, while we still print the error
        # or write a checkpoint. Its time limit stays.
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", "1")
    with _duplicates_told(topology, device):
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("process_group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=timeout_s),
            # A process group that is bound to a device refuses tensors on another one (ProcessGroupNCCL.cpp).
            device_id=device if on_gpu and topology.gpus_per_task == 1 else None,
        )
    if on_gpu:
        # NCCL's time starts when a collective is launched, before we wait for it. Its watchdog ends the process without
        # naming the rank that hangs. So it must act only if nothing waits for the collective.
        _backend(device).set_timeout(timedelta(seconds=2 * timeout_s))


def limit(group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
    """Give a further group of ranks the time limits of `join` (torch: 30 minutes), and watch its communicator."""
    with contextlib.suppress(RuntimeError):  # a group that was split off NCCL's may have none for the CPU
        _backend(torch.device("cpu"), group).set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cuda":
        _backend(device, group).set_timeout(timedelta(seconds=2 * timeout_s))
    _further.append(group)


@contextlib.contextmanager
def _duplicates_told(topology: Topology, device: torch.device) -> Iterator[None]:
    """Raise NCCL's error about a GPU that two ranks have (init.cc) in our form."""
    try:
        yield
    except dist.DistBackendError as error:
        found = next((line for line in str(error).splitlines() if any(words in line for words in _DUPLICATE)), None)
        if found is None:
            raise
        visible = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}"
        raise DeviceError(
            f"Computing on {device} as local rank {topology.local_rank}:",
            f"another rank has the same GPU ({visible}): {found.strip()}",
            "a GPU for each rank: --ntasks-per-node=N --gres=gpu:N; or with containers of your own, one each",
        ) from error


def communicator_error(device: torch.device) -> Exception | None:
    """Return what NCCL's watchdog has found wrong on this rank; None if nothing is. Callable from any thread.

    TORCH_NCCL_RETHROW_CUDA_ERRORS=0 also keeps back errors of the communicator, and before torch 2.15 time limits
    (ProcessGroupNCCL.cpp, Watchdog::run): the watchdog logs them and is gone.
    """
    if device.type != "cuda" or dist.group.WORLD is None:
        return None
    errors = [_backend(device, group).get_error() for group in (dist.group.WORLD, *_further)]
    error = next((one for one in errors if one != ErrorType.SUCCESS), None)
    if error is None:
        return None
    if error == ErrorType.TIMEOUT:
        return DeviceTimeoutError("NCCL's watchdog timed out waiting for a collective")
    return CommunicatorError(
        "Communicating with the other ranks over NCCL:",
        f"a connection broke, or another rank is gone ({error.name}).",
        "look at the other ranks' output and nodes, and at the lines above that NCCL's watchdog wrote; to see more of "
        "NCCL: export NCCL_DEBUG=WARN",
    )


def _backend(device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """A group's backend for a device; of the default group, if none is given.

    TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it, and torch 2.10's wrapper knows neither its time limit nor its errors.
    """
    group = group or dist.group.WORLD
    assert group is not None
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def check() -> None:
    """Check that the process group exists: the script may have ended it. Call it before each collective.

    Raises:
        SpecError: it has.
    """
    if not dist.is_initialized():
        raise SpecError(
            "A collective of all ranks:",
            "the script has ended the process group before (torch.distributed.destroy_process_group()).",
            "leave that call out: cluster_ddp.distributed() ends the process group when its body ends",
        )


def barrier() -> None:
    """Wait until all ranks are here, over gloo on the CPU, whatever their device.

    Raises:
        SpecError: as `check`.
        RuntimeError: gloo: a rank did not come in time or is gone. (NCCL would block in the device.)
    """
    check()
    dist.all_reduce(torch.zeros(1))


def leave() -> None:
    """End the process group together with all other ranks. The device must have done its work."""
    global ranks_store
    ranks_store = None
    time.sleep(_GLOO_SETTLES_S)
    while before_leaving:
        try:
            before_leaving.pop()()
        except Exception:  # the end of the training and its status matter more
            log.warning("Before leaving the world:", exc_info=True)
    if dist.is_initialized():  # else the script has ended it
        dist.destroy_process_group()


def abort(device: torch.device) -> bool:
    """End the process group on this rank alone, after a failure.

    Returns:
        Whether it has ended. If not, NCCL waits for ranks that will never come, and Python would wait for it at exit.
    """
    global ranks_store
    ranks_store = None
    if not dist.is_initialized():  # the script has ended it
        return True
    if device.type != "cuda":
        dist.destroy_process_group()
        return True
    has_ended = threading.Event()

    def end() -> None:
        with contextlib.suppress(Exception):  # the failure was already reported
            # destroy_process_group waits for collectives that a failed rank will never join.
            dist.distributed_c10d._abort_process_group()
            has_ended.set()

    threading.Thread(target=end, daemon=True).start()
    return has_ended.wait(_ABORT_S)
