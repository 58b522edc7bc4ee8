"""Tiers 3 and 4: the ranks meet and add numbers together, then take a step of DDP. Here torch is needed."""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cluster_ddp.agent.channel import Key
from cluster_ddp.runtime.fork.forked_program import TORCH_MODULES
from cluster_ddp.slurm.topology import Topology

if TYPE_CHECKING:
    import torch

MEETING_S = 60.0
"""Seconds that the ranks wait for each other."""
SIZES = (4 * 1024, 1024**2, 16 * 1024**2)
"""Bytes of the all-reduces that are timed."""
_COLLECTIVE_S = 20.0
_REPEATS = 5


def import_torch() -> tuple[float, str | None]:
    """Import torch, with all that DDP imports later: the others' collectives must not wait for an import.

    Returns the seconds that it took, and why it failed; None if it did not.
    """
    start = time.monotonic()
    try:
        for name in TORCH_MODULES:
            importlib.import_module(name)
    except BaseException as error:  # an extension may raise anything
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, None


def measure(topology: Topology, key: Key) -> Iterator[str | dict[str, Any]]:
    """Meet the other ranks, add numbers with them, and take a step of DDP with them.

    Yields the name of each check that begins, and what was measured:
        wrong: data types whose sum was wrong
        all_reduce_s: size in bytes -> seconds of an all-reduce, the median
        gradient: sum and sum of squares of the gradients
        step_s: seconds that this rank computed, without communication: its fastest of some tries

    Raises:
        Exception: a check failed, the one whose name came last.
    """
    from torch.distributed import ProcessGroupGloo

    from cluster_ddp.runtime import process_group
    from cluster_ddp.runtime.device import device as devices
    from cluster_ddp.runtime.rendezvous.host_setup import choose_interface
    from cluster_ddp.runtime.rendezvous.store import meet

    if "GLOO_DEVICE_TRANSPORT" in os.environ:
        yield "gloo_transport"
        ProcessGroupGloo.create_default_device()
    yield "rendezvous"
    device = devices.set_up(topology, cuda=True, deterministic=False)[0]
    store = meet(topology, device.type, key, timeout_s=MEETING_S)
    choose_interface(topology, os.environ)
    process_group.join(topology, device, store, timeout_s=_COLLECTIVE_S)
    process_group.barrier()
    yield "all_reduce"
    yield {"wrong": _wrong_sums(device, topology.world_size)}
    yield {"all_reduce_s": {str(size): _all_reduce_s(device, size) for size in SIZES}}
    yield "gradients"
    yield {"gradient": _gradient(device, topology), "step_s": _computing_s(device)}
    process_group.leave()


def _wrong_sums(device: torch.device, world_size: int) -> list[str]:
    import torch
    import torch.distributed as dist

    rank, wrong = dist.get_rank(), []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        # Small whole numbers: exact in all of them, whatever the order of the sum.
        values = torch.full((64,), rank % 3 + 1, dtype=dtype, device=device)
        dist.all_reduce(values)
        expected = sum(other % 3 + 1 for other in range(world_size))
        if world_size <= 64 and not bool((values == expected).all()):
            wrong.append(str(dtype).removeprefix("torch."))
    return wrong


def _all_reduce_s(device: torch.device, size: int) -> float:
    import torch
    import torch.distributed as dist

    reduce = functools.partial(dist.all_reduce, torch.zeros(size // 4, device=device))
    return statistics.median(_timed(device, time.monotonic, reduce) for _ in range(_REPEATS))


def _gradient(device: torch.device, topology: Topology) -> list[float]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
    wrapped = DistributedDataParallel(model) if topology.world_size > 1 else model
    torch.manual_seed(topology.rank + 1)  # each rank has its own batch
    wrapped(torch.randn(32, 256, device=device)).square().mean().backward()
    gradients = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]
    return [float(sum(one.sum() for one in gradients)), float(sum(one.square().sum() for one in gradients))]


def _computing_s(device: torch.device) -> float:
    """Return the seconds of some matrix products, 0.1 s on a core: the fastest of some tries, to leave out noise.

    On CPUs it is the CPU time: a rank that waits for a core which it shares is not slow itself.
    """
    import torch

    on_cpu = device.type == "cpu"
    size, products, clock = (512, 30, time.process_time) if on_cpu else (8192, 10, time.monotonic)
    left, right = (torch.randn(size, size, device=device) for _ in range(2))

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, right)

    return min(_timed(device, clock, multiply) for _ in range(_REPEATS))


def _timed(device: torch.device, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Return the seconds that some work takes on a device, by a clock."""
    _wait_for(device)
    start = clock()
    work()
    _wait_for(device)
    return clock() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
