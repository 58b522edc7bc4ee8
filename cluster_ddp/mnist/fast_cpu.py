"""What makes the reference workload fast, above all on CPUs, with the measured reason beside each.

`Step` switches it on: `FAST` has the models, `tune_malloc` sets up memory, `fastest` chooses the memory layout. Shares
of time were measured with torch 2.15 on one thread of an x86-64 CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from cluster_ddp import World
from cluster_ddp.mnist.model import Net, SmallNet

_WARM_UP, _ROUNDS = 2, 7
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; mallopt(3)
_ONE_GIB, _NEVER = 1 << 30, (1 << 31) - 1


class FastNet(Net):
    """`Net`, faster on CPUs: the same weights and values, to the bit; dropout draws other random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout1, self.dropout2 = ByteDropout(0.25), ByteDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        # Pool before relu: the same values and gradients, on a quarter of the memory. Dropout comes after flatten.
        x = F.relu(pooled(self.conv2(x)).flatten(1))
        x = F.relu(self.fc1(self.dropout1(x)))
        return _log_probabilities(self.fc2(self.dropout2(x)))


class FastSmallNet(SmallNet):
    """`SmallNet`, faster on CPUs: the same weights and values, to the bit where images are in channels_last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(pooled(self.conv1(x)))
        x = F.relu(pooled(self.conv2(x)).flatten(1))
        return _log_probabilities(self.fc2(F.relu(self.fc1(x))))


FAST: Mapping[type[nn.Module], Callable[[], nn.Module]] = {Net: FastNet, SmallNet: FastSmallNet}
"""What to make instead of a plain model."""


class ByteDropout(nn.Module):
    """Dropout (Srivastava et al. 2014) that on the CPU draws one random byte for each value.

    torch's own draws a double, which takes a fifth of the time of a step of `Net`. On a GPU torch's own is used.

    Args:
        p: probability of zero, below 1, a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        assert (256 * p).is_integer() and 0 <= p < 1
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values, in training mode only. The result has the shape and dtype of `x`."""
        if not self.training or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()] >= int(256 * self.p)
        return x * kept.view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The maximum of each 2 x 2 values: (N, C, H, W) -> (N, C, H // 2, W // 2), of the same dtype.

    On the CPU the forward and the backward pass use channels_last, whatever the input's layout, and the result has it.
    The bits are the same. A contiguous input takes sixteen times as long, a contiguous gradient three times.
    """
    if x.device.type != "cpu":
        return F.max_pool2d(x, 2)
    maxima = F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2)
    if maxima.requires_grad:
        maxima.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return maxima


def _log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(scores.float(), dim=1)  # in full precision under autocast on the CPU, too


def tune_malloc(env: Mapping[str, str]) -> None:
    """Let malloc keep freed memory (mallopt(3)), instead of giving large blocks back to the system at once.

    A training step frees all that it has allocated, and the next step allocates the same again. From the system that
    happens page by page: a fifth of the time of a step of the MNIST CNN (5,000 page faults in bf16, glibc 2.36). The
    process keeps the memory of its largest step. If the environment has settings for malloc, or the C library is not
    glibc, nothing changes.

    Args:
        env: such as os.environ; only read.
    """
    if any(name.startswith("MALLOC_") or (name == "GLIBC_TUNABLES" and "malloc" in env[name]) for name in env):
        return
    with contextlib.suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _ONE_GIB)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def fastest(world: World, ways: Mapping[str, Callable[[], object]]) -> tuple[str, dict[str, float]]:
    """Time several ways to do the same, alternately. A collective: the slowest rank counts.

    Args:
        world: of the ranks.
        ways: by name. A call must change nothing that matters; it may draw random numbers.

    Returns:
        The name of the fastest way, and for each way the seconds on the slowest rank (the median of 7 calls). Both are
        the same on all ranks.
    """
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for way in ways.values():
            for _ in range(_WARM_UP):
                way()
        rounds = [{name: _seconds(way, world) for name, way in ways.items()} for _ in range(_ROUNDS)]
    mine = {name: statistics.median(one[name] for one in rounds) for name in ways}
    ranks = world.gather(mine)
    slowest = {name: max(rank[name] for rank in ranks) for name in ways}
    return min(slowest, key=slowest.__getitem__), slowest


def _seconds(way: Callable[[], object], world: World) -> float:
    world.synchronize()
    start = time.perf_counter()
    way()
    world.synchronize()
    return time.perf_counter() - start
