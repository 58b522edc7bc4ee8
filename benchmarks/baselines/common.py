"""What all contenders share: the model, the options, and the stopwatch around each script's loop."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

Batch = TypeVar("Batch", bound="tuple[torch.Tensor, ...] | list[torch.Tensor]")


class Net(nn.Module):
    """The CNN of PyTorch's MNIST example: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="the root of torchvision's MNIST class")
    parser.add_argument("--warmup", type=int, default=50, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=250, help="measured steps, within the first epoch")
    parser.add_argument("--paced", action="store_true", help="measure again for each line of standard input")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's choice)")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, in the baselines")
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two lines of training loss")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and set torch's number of threads. Returns the options."""
    options = parser.parse_args()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # so that nothing else sets another number
        torch.set_num_threads(options.threads)
    return options


class Watch:
    """Times a loop from the outside, in blocks of steps: `for batch in watch(loader)`.

    After each block it prints a line of JSON: this process's samples, the seconds, and the seconds that it waited for
    data. With --paced it waits for a line on standard input before each block, so that processes can take turns, and
    ends with the input. Otherwise it ends after one block.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.warmup, self.is_paced = options.steps, options.warmup, options.paced

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of the blocks, warm-up included."""
        iterator = iter(batches)
        while not self.is_paced or sys.stdin.readline():
            yield from self._next(iterator, self.warmup, [])
            waits_s: list[float] = []
            start_s, samples = _now_s(), 0
            for batch in self._next(iterator, self.steps, waits_s):
                samples += len(batch[0])
                yield batch
            result = {"samples": samples, "seconds": _now_s() - start_s, "waited_s": sum(waits_s)}
            print(json.dumps(result), flush=True)
            if not self.is_paced:
                return

    @staticmethod
    def _next(iterator: Iterator[Batch], steps: int, waits_s: list[float]) -> Iterator[Batch]:
        for _ in range(steps):
            asked_s = time.perf_counter()
            batch = next(iterator, None)
            waits_s.append(time.perf_counter() - asked_s)
            if batch is None:
                raise SystemExit("the epoch has fewer steps than --warmup and --steps ask for")
            yield batch


def _now_s() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
