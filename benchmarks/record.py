"""What every benchmark prints: figures, and what they are compared with, as JSON. `bench.py` makes tables from it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    what: str
    """What was measured, with its conditions: "training, batch 64, fp32"."""
    values: Sequence[float]
    """One value for each run."""
    unit: str
    ratios: Sequence[float] = ()
    """Ratio to `peer`, one for each run. Both values are from the same round."""
    peer: str = ""
    """What it is compared with."""
    limit: str = ""
    """What the machine could do at best, and how that is known."""
    at_least: float | None = None
    """The target: for the median ratio if there are ratios, else for the median value. `at_most` likewise."""
    at_most: float | None = None

    def result(self) -> dict[str, object]:
        """The figure as a dictionary, with its medians, its spread, and whether the target is met."""
        judged = statistics.median(self.ratios or self.values)
        met = (self.at_least is None or judged >= self.at_least) and (self.at_most is None or judged <= self.at_most)
        has_target = (self.at_least, self.at_most) != (None, None)
        return {
            **asdict(self),
            "median": statistics.median(self.values),
            "spread": [min(self.values), max(self.values)],
            "ratio": statistics.median(self.ratios) if self.ratios else None,
            "runs": len(self.values),
            "met": met if has_target else None,
        }


def report(*figures: Figure, **more: object) -> None:
    """Print figures as JSON to standard output, with the machine, the versions, the day and the command."""
    print(json.dumps({"figures": [one.result() for one in figures], **about(), **more}, indent=2))


def unable(why: str) -> NoReturn:
    """Print why this can't be measured here, and exit with status 0."""
    print(json.dumps({"unable": why, **about()}, indent=2))
    sys.exit(0)


def about() -> dict[str, object]:
    """The machine, the versions, the day and the command."""
    from importlib.metadata import version

    arguments = [without_folder(argument) for argument in sys.argv[1:]]
    return {
        "hardware": ", ".join([*_gpus(), f"{len(os.sched_getaffinity(0))} cores of {_cpu()}"]),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "date": date.today().isoformat(),
        "command": " ".join([_launcher(), f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
    }


def _launcher() -> str:
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    return f"torchrun --nproc-per-node {ranks}" if ranks else "python"


def without_folder(argument: str) -> str:
    """An argument of a command for the record, without the folder of an absolute path."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}…/{Path(value).name}" if value.startswith("/") else argument


def _gpus() -> list[str]:
    """By name, where the benchmark has used torch."""
    torch = sys.modules.get("torch")
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
