"""What makes the reference workload fast, above all on CPUs, with the measured reason beside each.

`Step` switches it on: `FAST` has the models, `tune_malloc` sets up memory, `fastest` chooses the memory layout. Shares
of the time are those of torch 2.15 on one thread of an x86-64 CPU.
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
        # The maximum before relu: the same values and gradients, on a quarter of the memory; and dropout after flatten.
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

    torch's draws a double: a fifth of the step's time of `Net`. On a GPU it is torch's.

    Args:
        p: probability of zero, a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        assert (256 * p).is_integer() and 0 <= p < 1
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape and dtype."""
        if not self.training or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()] >= int(256 * self.p)
        return x * kept.view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The maximum of each 2 x 2 values.

    On the CPU in channels_last, there and back, whatever the input's layout: the same bits, but contiguous it takes
    sixteen times as long, and of a contiguous gradient three times.
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
    """Let malloc keep what is freed, instead of giving large blocks back to the system at once.

    A training step frees all that it has allocated, and the next one allocates the same again: from the system, page by
    page, which is a fifth of the time of a step of the MNIST CNN (5,000 page faults of bf16, glibc 2.36). The memory of
    the largest step stays with the process. Where malloc's settings are in the environment, or it is not glibc's,
    nothing changes.

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
    """Time the ways alternately. All ranks do so at once, and go by the slowest of them. A collective.

    Args:
        world: of the ranks.
        ways: by name; each leaves everything that matters as it was (random numbers may be drawn).

    Returns:
        The name of the fastest way, the same on all ranks, and the seconds that each takes.
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
