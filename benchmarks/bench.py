"""Run the benchmarks one after another: `make bench`, or `python benchmarks/bench.py [throughput …]` for some of them.

Their reports go into benchmarks/record.json, and as tables into benchmarks/README.md. Benchmarks that were not run keep
their entries. One that fails, or can't run on this machine, is marked there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import tables
from catalog import BENCHMARKS, FOLDER
from record import without_folder

RECORD, README = FOLDER / "record.json", FOLDER / "README.md"
GPU_FIGURES = FOLDER / "gpu-figures.json"
"""What `make test-gpu`, `test-gpu-pair` and `test-gpu-nodes` write: a report for each group. And throughput.py's, of a
machine with a GPU."""
_MEASURED_BY_TESTS = "What the tests for GPUs measured on the way."
GPU_GROUPS = {
    "throughput": (
        "Training samples a second on a GPU",
        "As above, with one process on one GPU. A step of 64 samples is far from what such a GPU can do.",
    ),
    "gpu": ("One GPU", _MEASURED_BY_TESTS),
    "gpu_pair": ("Two ranks on one GPU", _MEASURED_BY_TESTS),
    "gpu_nodes": ("GPUs of several nodes", _MEASURED_BY_TESTS),
}
TIMEOUT_S = 2400


def main() -> int:
    """Run the chosen benchmarks, and write record and tables after each. Returns the exit status."""
    options = _parse()
    chosen = [one for one in BENCHMARKS if not options.names or Path(one.script).stem in options.names]
    _fetch_mnist(options.data_dir, options.mnist_from)
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    fillings = {name: getattr(options, name) for name in ("data_dir", "peers", "torchx", "nvrx")}
    for one in chosen:
        start_s, others = time.monotonic(), Others()
        result = {**run(one.command(fillings)), "others_percent": others.percent()}
        if result.get("is_on_gpu"):
            GPU_FIGURES.write_text(json.dumps({**_gpu_reports(), Path(one.script).stem: result}, indent=2) + "\n")
        else:
            record[one.script] = result
        _write(record)
        print(f"{one.title}: {verdict(result)} ({time.monotonic() - start_s:.0f} s)", flush=True)
    return 1 if any("failed" in record.get(one.script, {}) for one in chosen) else 0


class Others:
    """How much CPU other processes use from now on: a loaded machine's figures mean little."""

    def __init__(self) -> None:
        self._start_s, self._used_s = time.monotonic(), self._by_others_s()

    def percent(self) -> float:
        """Percent of the time of all CPUs, stolen time of a virtual machine included."""
        cpus = os.cpu_count() or 1
        return 100 * (self._by_others_s() - self._used_s) / ((time.monotonic() - self._start_s) * cpus)

    @staticmethod
    def _by_others_s() -> float:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        ours = os.times()
        ours_s = ours.user + ours.system + ours.children_user + ours.children_system
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - ours_s


def run(command: list[str]) -> dict[str, Any]:
    """Run a benchmark. Returns its report, or how it failed."""
    try:
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return _failed(command, f"not done after {TIMEOUT_S} s")
    if done.returncode != 0:
        print(done.stderr[-2000:], file=sys.stderr)
        return _failed(command, f"status {done.returncode}: {(done.stderr.splitlines() or [''])[-1][:200]}")
    try:
        return dict(json.loads(done.stdout[done.stdout.index("{\n") :]))  # a training may have printed before it
    except ValueError:
        return _failed(command, "it printed no JSON")


def _failed(command: list[str], why: str) -> dict[str, Any]:
    words = ["python", *map(without_folder, command[1:])]
    return {"failed": why, "command": " ".join(words), "date": date.today().isoformat()}


def verdict(result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    if "figures" not in result:
        return str(result.get("unable") or f"failed: {result.get('failed')}")
    judged = [one for one in result["figures"] if one["met"] is not None]
    missed = [one["what"] for one in judged if not one["met"]]
    return f"{len(judged) - len(missed)} of {len(judged)} targets met{': not ' if missed else ''}{'; '.join(missed)}"


def _write(record: Mapping[str, Any]) -> None:
    ordered = {one.script: record[one.script] for one in BENCHMARKS if one.script in record}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
    sections = [tables.section(one.title, one.about, record[one.script]) for one in BENCHMARKS if one.script in record]
    sections += _gpu_sections()
    README.write_text(tables.replaced(README.read_text(), "\n\n".join(sections)))


def _gpu_sections() -> list[str]:
    """Of what has left figures of GPUs."""
    reports = _gpu_reports()
    return [tables.section(*words, reports[group]) for group, words in GPU_GROUPS.items() if group in reports]


def _gpu_reports() -> dict[str, Any]:
    return dict(json.loads(GPU_FIGURES.read_text())) if GPU_FIGURES.exists() else {}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [Path(one.script).stem for one in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(names)} (default: all)")
    parser.add_argument("--data-dir", default="data", help="the root of torchvision's MNIST class")
    parser.add_argument("--mnist-from", default="", help="a folder that may hold MNIST's files")
    parser.add_argument("--peers", default="", help="the Python of an environment with lightning-fabric and accelerate")
    parser.add_argument("--torchx", default="", help="the torchx to compare with")
    parser.add_argument("--nvrx", default="", help="the Python of an environment with nvidia-resiliency-ext")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


def _fetch_mnist(data_dir: str, source: str) -> None:
    """Fetch MNIST if it is missing. Without it, the benchmarks that need it fail and say so."""
    found = ["--from", source] if source else []
    command = [sys.executable, "scripts/download_data.py", "--data-dir", data_dir, *found]
    subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
