"""Tiers 3 and 4: the ranks meet and add numbers together, then take a step of DDP. Here torch is needed."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cluster_ddp.agent.channel import Key
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
    """Import torch. Returns the seconds that it took, and why it failed; None if it did not."""
    start = time.monotonic()
    try:
        import torch
        import torch.distributed
        import torch.nn.parallel  # noqa: F401 - for the time of the import
    except BaseException as error:  # an extension may raise anything
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, None


@dataclass(kw_only=True, slots=True)
class Measured:
    """What a rank has measured in tiers 3 and 4."""

    meet_s: float = 0.0
    """Seconds until the process group stood."""
    all_reduce_s: dict[str, float] = field(default_factory=dict)
    """Size in bytes -> seconds of an all-reduce, the median."""
    wrong: list[str] = field(default_factory=list)
    """Data types whose sum was wrong."""
    step_s: float = 0.0
    """Seconds that this rank computed, without communication: its fastest of some tries."""
    gradient: list[float] = field(default_factory=list)
    """Sum and sum of squares of the gradients."""
    failure: str | None = None
    """Why it broke off; None if it did not."""
    failed_in: str = ""
    """Check in which it broke off."""


def measure(topology: Topology, key: Key) -> Iterator[str | dict[str, Any]]:
    """Meet the other ranks, add numbers with them, and take a step of DDP with them.

    Yields the name of each check that begins, at last the fields of a `Measured`.
    """
    from torch.distributed import ProcessGroupGloo

    from cluster_ddp.runtime import process_group
    from cluster_ddp.runtime.device import device as devices
    from cluster_ddp.runtime.rendezvous.host_setup import choose_interface
    from cluster_ddp.runtime.rendezvous.store import meet

    found, start = Measured(failed_in="rendezvous"), time.monotonic()
    yield found.failed_in
    try:
        device = devices.set_up(topology, cuda=True, deterministic=False)[0]
        if "GLOO_DEVICE_TRANSPORT" in os.environ:
            found.failed_in = "gloo_transport"
            ProcessGroupGloo.create_default_device()
            found.failed_in = "rendezvous"
        store = meet(topology, device.type, key, timeout_s=MEETING_S)
        choose_interface(topology, os.environ)
        process_group.join(topology, device, store, timeout_s=_COLLECTIVE_S)
        process_group.barrier()
        found.meet_s = time.monotonic() - start
        found.failed_in = "all_reduce"
        yield found.failed_in
        _collectives(device, topology.world_size, found)
        found.failed_in = "gradients"
        yield found.failed_in
        _step(device, topology, found)
        process_group.leave()
        found.failed_in = ""
    except Exception as error:
        found.failure = " ".join(str(error).split())[:300] or type(error).__name__
    yield asdict(found)


def _collectives(device: torch.device, world_size: int, found: Measured) -> None:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        # Small whole numbers: exact in all of them, whatever the order of the sum.
        values = torch.full((64,), rank % 3 + 1, dtype=dtype, device=device)
        dist.all_reduce(values)
        expected = sum(other % 3 + 1 for other in range(world_size))
        if world_size <= 64 and not bool((values == expected).all()):
            found.wrong.append(str(dtype).removeprefix("torch."))
    for size in SIZES:
        values = torch.zeros(size // 4, device=device)
        reduce = functools.partial(dist.all_reduce, values)
        times = [_timed(device, time.monotonic, reduce) for _ in range(_REPEATS)]
        found.all_reduce_s[str(size)] = statistics.median(times)


def _step(device: torch.device, topology: Topology, found: Measured) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
    wrapped = DistributedDataParallel(model) if topology.world_size > 1 else model
    torch.manual_seed(topology.rank + 1)  # each rank has its own batch
    wrapped(torch.randn(32, 256, device=device)).square().mean().backward()
    gradients = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]
    found.gradient = [float(sum(one.sum() for one in gradients)), float(sum(one.square().sum() for one in gradients))]
    found.step_s = _computing(device)


def _computing(device: torch.device) -> float:
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
