"""Seconds from a fault to the next completed step: `python benchmarks/recovery.py` (as root, on Linux, with Slurm).

Four ranks on four nodes of a sandbox, and a spare, train at ten steps a second. A rank is killed, or a node's link is
cut. It measures `--restarts` in the allocation; beside it a requeue of the job. Both take turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from record import Figure, report, unable

from cluster_ddp.sandbox import cluster, network, prerequisites
from cluster_ddp.sandbox.layout import Layout
from cluster_ddp.slurm import commands

FOLDER = Path(__file__).parent.resolve()
TRAINING = FOLDER / "recovery_training.py"
NAME = "recovery"
NODES = 4
STEPS_BEFORE = 30
PATIENCE_S = 240.0
RANK_KILLED, NODE_CUT = "rank killed", "node cut"
TARGETS_S = {RANK_KILLED: 5.0, NODE_CUT: 10.0}


class Contender(NamedTuple):
    """What starts the ranks again."""

    name: str
    launch: str
    """The last line of the batch script, up to the training."""
    nodes: int
    is_requeued: bool = False
    """Whether the job is requeued by hand, as soon as a rank is killed."""


LAUNCH = f"exec {shlex.quote(sys.executable)} -m cluster_ddp launch"
OURS = "--restarts"
CONTENDERS = (
    Contender(OURS, f"{LAUNCH} --restarts 9 --spare-nodes 1 --", NODES + 1),
    Contender("a requeue", f"{LAUNCH} --", NODES, is_requeued=True),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or prerequisites.missing_programs():
        unable("a sandbox needs root, and Slurm's programs")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="cluster-ddp-recovery-") as folder:
        layout = cluster.up(NAME, nodes=NODES + 1, gpus_per_node=1)
        try:
            for number in range(arguments.rounds):
                for one in CONTENDERS:
                    for fault in TARGETS_S:
                        run = Run(layout, one, Path(folder) / f"{number}-{one.name}-{fault}")
                        seconds.setdefault((one.name, fault), []).append(run.recovered_in(fault))
                        print(f"{one.name}, {fault}: {seconds[one.name, fault][-1]:.1f} s", file=sys.stderr)
        finally:
            cluster.down(NAME)
    report(*(_figure(who, fault, values, seconds) for (who, fault), values in seconds.items()))


def _figure(who: str, fault: str, values: list[float], all_values: dict[tuple[str, str], list[float]]) -> Figure:
    what = f"{fault}: {who}"
    ours = all_values[OURS, fault]
    if who == OURS:
        return Figure(what=what, values=values, unit="s", at_most=TARGETS_S[fault])
    return Figure(what=what, values=values, unit="s", ratios=[a / b for a, b in zip(values, ours)], peer=OURS)


class Run:
    """One training and one fault."""

    def __init__(self, layout: Layout, contender: Contender, folder: Path) -> None:
        self._layout, self._contender, self._steps = layout, contender, folder / "steps"
        folder.mkdir()
        self._env = {**cluster.environment(layout.name), "OMP_NUM_THREADS": "1", "CLUSTER_DDP_RUN_DIR": str(folder)}
        words = shlex.join([sys.executable, str(TRAINING), str(self._steps)])
        text = f"#!/bin/bash\n{contender.launch} {words}\n"
        options = [f"--nodes={contender.nodes}", "--ntasks-per-node=1", "--gres=gpu:1", "--requeue"]
        options += [f"--output={folder}/job.log", "--open-mode=append"]
        self._job = commands.submit(text=text, options=options, env=self._env).job_id

    def recovered_in(self, fault: str) -> float:
        """Make the fault. Returns the seconds until a step of another process of rank 0, or of the same one."""
        try:
            self._wait(lambda: len(self._done()) >= STEPS_BEFORE, "the first steps")
            before = {one["process"] for one in self._done()}
            with self._made(fault) as made_at:
                self._wait(lambda: any(one["process"] not in before for one in self._done()), f"a step after: {fault}")
            return next(float(one["time"]) for one in self._done() if one["process"] not in before) - made_at
        finally:
            commands.run(["scancel", str(self._job)], env=self._env)
            cluster.wait_until_usable(self._layout, self._layout.node_names, [])

    @contextlib.contextmanager
    def _made(self, fault: str) -> Iterator[float]:
        node = self._layout.node_names[2]
        made_at = time.time()
        if fault == RANK_KILLED:
            os.kill(self._rank_on(node), signal.SIGKILL)
            if self._contender.is_requeued:
                commands.run(["scontrol", "requeue", str(self._job)], env=self._env)
            yield made_at
            return
        network.ip("link", "set", self._layout.link(node), "down")
        try:
            yield made_at
        finally:
            network.ip("link", "set", self._layout.link(node), "up")

    def _rank_on(self, node: str) -> int:
        namespace = network.NAMESPACE_ROOT / self._layout.namespace(node)
        words = os.fsencode(TRAINING)
        found = [pid for pid in network.processes_in([namespace]) if words in _words(pid)[1:3]]
        return found[0]

    def _done(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._steps.read_text().splitlines()] if self._steps.exists() else []

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                log = (self._steps.parent / "job.log").read_text(errors="replace")
                raise SystemExit(f"{self._contender.name}: waited {PATIENCE_S:g} s for {what}\n{log}")
            time.sleep(0.05)


def _words(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


if __name__ == "__main__":
    main()
