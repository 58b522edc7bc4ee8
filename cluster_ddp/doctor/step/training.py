"""Tiers 3 and 4: the ranks meet and add numbers together, then take a step of DDP. Here torch is needed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from cluster_ddp.agent.secret import Key
from cluster_ddp.doctor.checks import of_all
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.doctor.step.links import shown_rate
from cluster_ddp.slurm.topology import Topology

if TYPE_CHECKING:
    import torch

MEETING_S = 60.0
"""Seconds that the ranks wait for each other."""
_COLLECTIVE_S = 20.0
_SIZES = (4 * 1024, 1024**2, 16 * 1024**2)
_REPEATS = 5
_STRAGGLER = 1.5
_SLOW_IMPORT_S = 60.0

CHECKS = of_all(
    "training",
    torch_import="torch that can't be imported, or takes more than a minute to import",
    rendezvous="ranks that don't meet, or whose process group can't be made",
    all_reduce="an all-reduce with a wrong result, or that fails",
    gradients="gradients that differ between ranks after a step of DDP",
    straggler="a rank that computes 1.5 times as long as the median",
)


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
    from cluster_ddp.runtime.rendezvous.host_network import choose_interface
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
    for size in _SIZES:
        values = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(_REPEATS):
            _settled(device)
            start = time.monotonic()
            dist.all_reduce(values)
            _settled(device)
            times.append(time.monotonic() - start)
        found.all_reduce_s[str(size)] = statistics.median(times)


def _step(device: torch.device, topology: Topology, found: Measured) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
    several = topology.world_size > 1
    wrapped = DistributedDataParallel(model) if several else model
    torch.manual_seed(topology.rank + 1)  # each rank has its own batch
    wrapped(torch.randn(32, 256, device=device)).square().mean().backward()
    gradients = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]
    found.gradient = [float(sum(one.sum() for one in gradients)), float(sum(one.square().sum() for one in gradients))]
    found.step_s = _computing(device)


def _computing(device: torch.device) -> float:
    """The seconds of some matrix products, 0.1 s on a core: the fastest of some tries, to leave out noise.

    On CPUs it is the CPU time: a rank that waits for a core which it shares is not slow itself.
    """
    import torch

    on_cpu = device.type == "cpu"
    size, products, clock = (512, 30, time.process_time) if on_cpu else (8192, 10, time.monotonic)
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    times = []
    for _ in range(_REPEATS):
        _settled(device)
        start = clock()
        for _ in range(products):
            torch.mm(left, right)
        _settled(device)
        times.append(clock() - start)
    return min(times)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def judge(measured: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    """Return what is wrong with collectives and the step.

    Args:
        measured: rank -> the fields of its `Measured`.
        hosts: rank -> its host.
    """
    return [
        *_failures(measured, hosts),
        *_wrong(measured, hosts),
        *_gradients(measured, hosts),
        *_stragglers(measured, hosts),
    ]


def judge_imports(reports: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return on which ranks torch can't be imported, or slowly."""
    found = []
    for rank, report in reports.items():
        seconds, failure, host = report["import_s"], report["failure"], str(report["host"])
        if failure is not None:
            what, hint = "torch can't be imported.", "repair the environment there: python -c 'import torch'"
            one = Finding(check="torch_import", what=what, evidence=failure[:300], hint=hint, sick_nodes=(host,))
            found.append(one.seen_by(rank, host))
        elif seconds > _SLOW_IMPORT_S:
            what = "Importing torch is slow."
            hint = "let the nodes import from their own disks: cluster-ddp submit --stage-env"
            one = Finding(check="torch_import", what=what, evidence=f"{seconds:.0f} s", hint=hint, is_warning=True)
            found.append(one.seen_by(rank, host))
    return found


_FAILED = {
    "gloo_transport": (
        "This build of torch lacks the transport that GLOO_DEVICE_TRANSPORT names; each has TCP.",
        "unset GLOO_DEVICE_TRANSPORT in the batch script and in your shell's start files",
    ),
    "rendezvous": (
        "The ranks can't form a process group.",
        "try another interface: export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…; NCCL says more with NCCL_DEBUG=INFO",
    ),
    "all_reduce": (
        "An all-reduce fails.",
        "NCCL says more with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1",
    ),
    "gradients": ("A step of DDP fails.", "read the error; try the same on one node"),
}


def _failures(measured: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    """Why ranks broke off, of those that did so first."""
    order = list(_FAILED)
    broken = {rank: one for rank, one in measured.items() if one["failure"] is not None}
    first = min((order.index(one["failed_in"]) for one in broken.values()), default=0)
    check, (what, hint) = order[first], _FAILED[order[first]]
    return [
        Finding(check=check, what=what, evidence=one["failure"], hint=hint).seen_by(rank, hosts[rank])
        for rank, one in broken.items()
        if one["failed_in"] == check
    ]


def _wrong(measured: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    what = "An all-reduce gives a wrong sum."
    hint = "a network card, a GPU or its driver is broken: leave nodes out one by one, --exclude=NODE; tell your site"
    return [
        Finding(check="all_reduce", what=what, evidence=", ".join(one["wrong"]), hint=hint).seen_by(rank, hosts[rank])
        for rank, one in measured.items()
        if one["wrong"]
    ]


def _gradients(measured: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    values = {rank: tuple(one["gradient"]) for rank, one in measured.items() if one["gradient"]}
    if len(set(values.values())) < 2:
        return []
    usual, two = statistics.mode(values.values()), len(values) == 2
    what = "Gradients differ between ranks after a step of DDP."
    hint = "a GPU or a link is broken: leave that node out, --exclude=NODE; the same torch and NCCL everywhere?"
    return [
        Finding(check="gradients", what=what, evidence=f"their sum is {one[0]:.9g}", hint=hint).seen_by(
            rank, hosts[rank]
        )
        for rank, one in values.items()
        if one != usual or two
    ]


def _stragglers(measured: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    times = {rank: one["step_s"] for rank, one in measured.items() if one["step_s"]}
    found = []
    for rank, seconds in times.items():
        others = [other for number, other in times.items() if number != rank]
        if others and seconds > _STRAGGLER * (usual := statistics.median(others)):
            processes = "look for other processes there, and for hot GPUs (nvidia-smi -q -d PERFORMANCE)"
            one = Finding(
                check="straggler",
                what="A rank is slower than the others: all wait for it in each step.",
                evidence=f"{1e3 * seconds:.0f} ms for what takes the others {1e3 * usual:.0f} ms",
                hint=f"{processes}; else leave the node out: --exclude={hosts[rank]}",
                is_warning=True,
                sick_nodes=(hosts[rank],),
            )
            found.append(one.seen_by(rank, hosts[rank]))
    return found


def shown(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return the times of the all-reduces in words, of the slowest rank, and the bandwidth of the largest.

    It is what each rank sends, 2 (n - 1) / n of the size: "busbw" of nccl-tests.
    """
    parts, bandwidth, ranks = [], "", len(measured)
    for size in _SIZES:
        if times := [one["all_reduce_s"][str(size)] for one in measured if str(size) in one["all_reduce_s"]]:
            text = f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
            parts.append(f"{text} {1e3 * max(times):.2g} ms")
            if ranks > 1:
                bandwidth = f" (busbw {shown_rate(2 * (ranks - 1) / ranks * size / max(times))})"
    return f"all-reduce {', '.join(parts)}{bandwidth}" if parts else ""
