"""Tests that need a GPU: `python tests/gpu/run.py gpu`, or gpu_pair, or gpu_nodes; `--rehearse` runs them on the CPU.

gpu         one process, one GPU (single.py)
gpu_pair    two ranks on one GPU (pair.py)
gpu_nodes   two nodes with eight GPUs each, through srun (nodes.py)

Needs Python, torch and NumPy, nothing else. Figures go to benchmarks/gpu-figures.json. Where GPUs are missing it says
loudly that nothing was tested.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import machine
from lab import LIMIT_S, Lab
from processes import ROOT

GROUPS = {"gpu": "single", "gpu_pair": "pair", "gpu_nodes": "nodes"}
FIGURES = ROOT / "benchmarks" / "gpu-figures.json"


def main() -> int:
    """Run a group; 1 if any of its tests failed."""
    options = _parser().parse_args()
    tests = _chosen(importlib.import_module(GROUPS[options.group]).TESTS, options)
    here = machine.Machine() if options.rehearse else machine.look(_one_task_a_node(options))
    why = None if options.rehearse else here.lack(options.group, options.gpus_per_node)
    if why is not None:
        print(machine.refusal(options.group, len(tests), here, why))
        print(f"0 passed, 0 failed, {len(tests)} skipped", flush=True)
        return 0
    with _folder(options) as folder:
        lab = _lab(options, folder, here)
        counts = _run(tests, lab, time.monotonic() + _limit_s(options, len(tests)))
    _write_figures(lab, options)
    print("{passed} passed, {failed} failed, 0 skipped".format(**counts), flush=True)
    return 1 if counts["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with gloo, as far as that goes")
    parser.add_argument("--only", action="append", metavar="NAME", help="tests with this in their names; repeatable")
    parser.add_argument("--one-of-each", action="store_true", help="of a test's variants, such as -graph, the first")
    parser.add_argument("--figures", type=Path, metavar="PATH", help=f"default: {FIGURES.relative_to(ROOT)}")
    parser.add_argument("--limit-s", type=float, metavar="S", help="for the group (default: 600 for each test)")
    parser.add_argument("--nodes", type=int, default=2, help="gpu_nodes: how many (default: %(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="gpu_nodes: and ranks (default: %(default)s)")
    words = "gpu_nodes: CPUs of a rank (default: %(default)s); srun takes none from the job's since Slurm 22.05"
    parser.add_argument("--cpus-per-task", type=int, default=4, metavar="N", help=words)
    parser.add_argument("--srun", default="", metavar="ARGUMENTS", help="gpu_nodes: more arguments for srun")
    parser.add_argument("--folder", type=Path, help="gpu_nodes: for runs, seen by all nodes (default: runs/)")
    return parser


def _limit_s(options: argparse.Namespace, tests: int) -> float:
    """Of the group. A cold start on a GPU takes up to half a minute, and a test has several."""
    return float(options.limit_s if options.limit_s is not None else LIMIT_S * tests)


def _chosen(tests: dict[str, Callable[[Lab], None]], options: argparse.Namespace) -> dict[str, Callable[[Lab], None]]:
    only = options.only
    chosen = {name: test for name, test in tests.items() if not only or any(one in name for one in only)}
    if not chosen:
        sys.exit(f"error: no test has {only} in its name. Hint: one of {', '.join(tests)}")
    if options.one_of_each:
        first = {name.partition("-")[0]: name for name in reversed(chosen)}
        chosen = {name: test for name, test in chosen.items() if name in first.values()}
    return chosen


def _lab(options: argparse.Namespace, folder: Path, here: machine.Machine) -> Lab:
    if options.group == "gpu":
        return Lab(folder=folder, rehearse=options.rehearse)
    if options.group == "gpu_pair" or options.rehearse:
        shares = here.shares_gpu and not options.rehearse
        return Lab(folder=folder, rehearse=options.rehearse, world_size=2, shares_gpu=shares)
    per_node = options.gpus_per_node
    srun = [*_place(options), f"--ntasks-per-node={per_node}"]
    return Lab(folder=folder, rehearse=False, world_size=options.nodes * per_node, srun=srun)


def _place(options: argparse.Namespace) -> list[str]:
    sizes = [f"--nodes={options.nodes}", f"--gres=gpu:{options.gpus_per_node}"]
    return [*sizes, f"--cpus-per-task={options.cpus_per_task}", *shlex.split(options.srun)]


def _one_task_a_node(options: argparse.Namespace) -> list[str]:
    """The command that asks each node; nothing where it is this one."""
    return ["srun", *_place(options), "--ntasks-per-node=1"] if options.group == "gpu_nodes" else []


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    """For the runs; gone in the end."""
    parent = options.folder
    if options.group == "gpu_nodes" and parent is None:
        parent = ROOT / "runs"  # other nodes see the repository, or they could not run it
        parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-gpu-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(tests: dict[str, Callable[[Lab], None]], lab: Lab, deadline: float) -> dict[str, int]:
    counts = {"passed": 0, "failed": 0}
    for name, test in tests.items():
        start_s = time.monotonic()
        lab.notes.clear()
        outcome, words = _outcome(test, lab, min(LIMIT_S, deadline - start_s))
        counts[outcome] += 1
        shown = "ok" if outcome == "passed" else "FAILED"
        print(f"{shown:8}{name} ({time.monotonic() - start_s:.1f} s)", *words.splitlines(), sep="\n    ", flush=True)
        for note in lab.notes:
            print(f"    {note}", flush=True)
    return counts


def _outcome(test: Callable[[Lab], None], lab: Lab, limit_s: float) -> tuple[str, str]:
    if limit_s < 1:
        return "failed", "not run: the group's time is over (--limit-s)"
    try:
        with _limited(limit_s):
            test(lab)
    except Exception:
        lines = traceback.format_exc().rstrip().splitlines()
        return "failed", "\n".join(line for line in lines if "Train Epoch: " not in line)
    return "passed", ""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise in the body when its time is over; what it has started is ended on the way out."""

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"the test took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write_figures(lab: Lab, options: argparse.Namespace) -> None:
    """Into the file of all groups, in this one's place. A rehearsal writes where it is told to only."""
    path = options.figures or (None if options.rehearse else FIGURES)
    if path is None or (not lab.figures and not options.rehearse):
        return
    groups = json.loads(path.read_text()) if path.exists() else {}
    groups[options.group] = {
        "figures": [figure.result() for figure in lab.figures],
        "hardware": lab.about.get("device", "unknown"),
        "versions": lab.about.get("versions", "unknown"),
        "date": date.today().isoformat(),
        "command": f"python tests/gpu/run.py {options.group}",
        "is_rehearsal": options.rehearse,
    }
    path.write_text(json.dumps(groups, indent=2) + "\n")
    print(f"{len(lab.figures)} figures in {path}")


if __name__ == "__main__":
    sys.exit(main())
