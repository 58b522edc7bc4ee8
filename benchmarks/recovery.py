"""Seconds from a fault to the next completed step: `python benchmarks/recovery.py` (as root, on Linux, with Slurm).

Four ranks on four nodes of a sandbox, and a spare, train at ten steps a second. After 15 s a rank is killed or stopped,
or a node's link is cut. It measures `--restarts` in the allocation; beside it a requeue of the job, and in an
allocation of four nodes torchrun's `--max-restarts` and NVRx's ft_launcher, started by srun, with a training in plain
torch. All take turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from record import Figure, report, unable
from recovery_training import HANG_WARNING_S, STEP_S

from cluster_ddp.sandbox import cluster, daemons, network, prerequisites
from cluster_ddp.sandbox.layout import Layout
from cluster_ddp.slurm import commands, job_status

FOLDER = Path(__file__).parent.resolve()
TRAINING, PLAIN = FOLDER / "recovery_training.py", FOLDER / "recovery_plain.py"
NAME = "recovery"
NODES = 4
STEPS_BEFORE = round(15 / STEP_S)
"""Before the fault: 10 s after a start the agents make what the next start needs."""
PATIENCE_S = 240.0
HANG_RESTART_S = 5
RANK_KILLED, NODE_CUT, RANK_STOPPED = "rank killed", "node cut", "rank stopped"
TARGETS_S = {RANK_KILLED: 5.0, NODE_CUT: 10.0, RANK_STOPPED: HANG_WARNING_S + HANG_RESTART_S + 10}


class Contender(NamedTuple):
    """What starts the ranks again."""

    name: str
    launch: str
    """The last line of the batch script, up to the training."""
    nodes: int = NODES
    training: Path = PLAIN
    faults: tuple[str, ...] = (RANK_KILLED, NODE_CUT)
    is_requeued: bool = False
    """Whether Slurm starts the job again; by hand, as soon as a rank is killed."""


class NotRecoveredError(Exception):
    """No step followed a fault; the text says why."""


# Else the ranks of the next start read the addresses of the last one in the store of torchrun's agent: with torch 2.14
# and gloo they then never meet again.
OWN_STORE = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
PYTHON = shlex.quote(sys.executable)
LAUNCH = f"exec {PYTHON} -m cluster_ddp launch"
OURS = "--restarts"
OPTIONS = f"--restarts 9 --spare-nodes 1 --hang-restart-s {HANG_RESTART_S}"
ELASTIC = (
    f"--nnodes={NODES} --nproc-per-node=1 --max-restarts=9 --rdzv-backend=c10d "
    '--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$SLURMD_NODENAME:29400"'
)
NVRX_MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"


def contenders(nvrx: str) -> Iterator[Contender]:
    """All that can run here.

    Args:
        nvrx: the Python of an environment with nvidia-resiliency-ext; empty without one.
    """
    yield Contender(OURS, f"{LAUNCH} {OPTIONS} -- {PYTHON}", NODES + 1, TRAINING, (RANK_KILLED, NODE_CUT, RANK_STOPPED))
    yield Contender("a requeue", f"{LAUNCH} -- {PYTHON}", training=TRAINING, is_requeued=True)
    torchrun = f"{OWN_STORE}; exec srun {PYTHON} -m torch.distributed.run {ELASTIC}"
    yield Contender("torchrun --max-restarts", torchrun)
    if nvrx:
        launcher = f"{shlex.quote(nvrx)} -m {NVRX_MODULE} --ignore-missing-fault-tol-cfg"
        yield Contender("NVRx's ft_launcher", f"{OWN_STORE}; exec srun {launcher} {ELASTIC}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--nvrx", default="", help="the Python of an environment with nvidia-resiliency-ext")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or prerequisites.missing_programs():
        unable("a sandbox needs root, and Slurm's programs")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    left_out = [] if arguments.nvrx else ["NVRx's ft_launcher: no environment with it was named (--nvrx)"]
    if arguments.nvrx and (why := _does_not_start(arguments.nvrx)):
        arguments.nvrx, left_out = "", [f"NVRx's ft_launcher: {why}"]
    measured = Measured(list(contenders(arguments.nvrx)))
    with tempfile.TemporaryDirectory(prefix="cluster-ddp-recovery-") as folder:
        layout = cluster.up(NAME, nodes=NODES + 1, gpus_per_node=1)
        try:
            for number in range(arguments.rounds):
                measured.one_round(layout, Path(folder) / str(number))
        finally:
            cluster.down(NAME)
    report(*measured.figures(), left_out=[*left_out, *measured.left_out])


def _does_not_start(nvrx: str) -> str | None:
    """Why NVRx does not start there; None if it does."""
    done = subprocess.run([nvrx, "-m", NVRX_MODULE, "--help"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"it does not start: {done.stderr.strip().splitlines()[-1:]}"


class Measured:
    """What was measured of each contender and fault, and what could not be."""

    def __init__(self, chosen: Sequence[Contender]) -> None:
        self._chosen = chosen
        self._seconds: dict[tuple[str, str], dict[Path, float]] = {}
        self._why: dict[tuple[str, str], str] = {}

    def one_round(self, layout: Layout, folder: Path) -> None:
        """Measure all contenders and faults once. What did not recover is not tried again."""
        for one in self._chosen:
            for fault in one.faults:
                if (one.name, fault) in self._why:
                    continue
                run = Run(layout, one, folder / f"{one.name}-{fault}")
                try:
                    took_s = run.recovered_in(fault)
                except NotRecoveredError as error:
                    self._why[one.name, fault] = said = str(error)
                else:
                    self._seconds.setdefault((one.name, fault), {})[folder], said = took_s, f"{took_s:.1f} s"
                print(f"{one.name}, {fault}: {said}", file=sys.stderr, flush=True)

    @property
    def left_out(self) -> list[str]:
        """What did not recover, and why."""
        return [f"{fault}, {who}: {why}" for (who, fault), why in self._why.items()]

    def figures(self) -> Iterator[Figure]:
        """What recovered."""
        for (who, fault), by_round in self._seconds.items():
            values, what = list(by_round.values()), f"{fault}: {who}"
            if who == OURS:
                yield Figure(what=what, values=values, unit="s", at_most=TARGETS_S[fault])
            else:
                ours = self._seconds.get((OURS, fault), {})
                ratios = [value / ours[number] for number, value in by_round.items() if number in ours]
                yield Figure(what=what, values=values, unit="s", ratios=ratios, peer=OURS if ratios else "")


class Run:
    """One training and one fault."""

    def __init__(self, layout: Layout, contender: Contender, folder: Path) -> None:
        self._layout, self._contender, self._steps = layout, contender, folder / "steps"
        folder.mkdir(parents=True)
        self._env = {**cluster.environment(layout.name), "OMP_NUM_THREADS": "1", "CLUSTER_DDP_RUN_DIR": str(folder)}
        text = f"#!/bin/bash\n{contender.launch} {shlex.join([str(contender.training), str(self._steps)])}\n"
        options = [f"--nodes={contender.nodes}", "--ntasks-per-node=1", "--gres=gpu:1"]
        options += ["--requeue" if contender.is_requeued else "--no-requeue"]
        options += [f"--output={folder}/job.log", "--open-mode=append"]
        self._job = commands.submit(text=text, options=options, env=self._env).job_id

    def recovered_in(self, fault: str) -> float:
        """Make the fault. Returns the seconds until a step of another process of rank 0.

        Raises:
            NotRecoveredError: none came.
        """
        try:
            self._wait(lambda: len(self._done()) >= STEPS_BEFORE, "the first steps")
            before = {one["process"] for one in self._done()}
            with self._made(fault) as made_at:
                self._wait(lambda: any(one["process"] not in before for one in self._done()), f"a step after: {fault}")
            return next(float(one["time"]) for one in self._done() if one["process"] not in before) - made_at
        finally:
            commands.run(["scancel", str(self._job)], env=self._env)
            daemons.wait_until_usable(self._layout, self._layout.node_names, [])

    @contextlib.contextmanager
    def _made(self, fault: str) -> Iterator[float]:
        node = self._layout.node_names[2]
        if fault == NODE_CUT:
            made_at = time.time()
            network.ip("link", "set", self._layout.link(node), "down")
            try:
                yield made_at
            finally:
                network.ip("link", "set", self._layout.link(node), "up")
            return
        victim, made_at = int(Path(f"{self._steps}.{node}").read_text()), time.time()
        os.kill(victim, signal.SIGKILL if fault == RANK_KILLED else signal.SIGSTOP)
        if self._contender.is_requeued:
            commands.run(["scontrol", "requeue", str(self._job)], env=self._env)
        yield made_at

    def _done(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._steps.read_text().splitlines()] if self._steps.exists() else []

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        begun = asked = time.monotonic()
        while not condition():
            if time.monotonic() - asked > 1:
                (status,) = job_status.job_statuses(self._job, env=self._env)
                asked = time.monotonic()
                if status.ended and not condition():
                    self._give_up(f"the job ended as {status.state} after {asked - begun:.0f} s without {what}")
            if time.monotonic() - begun > PATIENCE_S:
                self._give_up(f"waited {PATIENCE_S:g} s for {what}")
            time.sleep(0.05)

    def _give_up(self, why: str) -> None:
        """Raise that it did not recover. Ours must: that is a failure of the benchmark."""
        if self._contender.name == OURS or not self._done():
            log = (self._steps.parent / "job.log").read_text(errors="replace")
            raise SystemExit(f"{self._contender.name}: {why}\n{log}")
        raise NotRecoveredError(why)


if __name__ == "__main__":
    main()
