"""Jobs that an administrator, or gang scheduling, suspends and resumes: nothing fails, and no start is used up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from cluster import Cluster, Place
from paced_run import PACED, TRAINING
from restarting import launch
from slowness import wait_until
from test_packs import start as start_packed

from cluster_ddp import processes
from cluster_ddp.run.names import Env
from cluster_ddp.slurm import commands, job_status

pytestmark = pytest.mark.full

SUSPENDED_S = 12.0
"""Longer than each pause after which an agent or a rank looks again."""
TASK = """
import os, time
while not os.path.exists("go"):
    print("waits", flush=True)
    time.sleep(0.2)
"""


def suspend(place: Place, job: str, run_dirs: Iterable[Path], seconds: float = SUSPENDED_S) -> None:
    """All processes that know a run directory of the job are stopped meanwhile: ranks, too, that were forked."""
    below = [pid for run_dir in run_dirs for pid in processes.environments({Env.RUN_DIR: str(run_dir.resolve())})]
    commands.run(["scontrol", "suspend", job], env=place.slurm.env)
    assert job_status.job_statuses(job, env=place.slurm.env)[0].state == "SUSPENDED"
    wait_until(lambda: all(map(processes.is_stopped, below)), said=lambda: f"{[*map(processes.stat, below)]}")
    assert below
    time.sleep(seconds)
    commands.run(["scontrol", "resume", job], env=place.slurm.env)


@pytest.mark.fault(
    "the job is suspended and resumed (`scontrol suspend`, gang scheduling, SIGSTOP and SIGCONT)",
    "it trains on, exactly. Deadlines, time limits and hang warnings don't count the suspension. If ranks wait in a "
    "collective and the suspension is longer than `--collective-timeout-s`, that start fails; with `--restarts`, it "
    "counts towards no limit",
    bound="the suspension",
    also=("test_suspended_tasks_of_a_pack_are_neither_late_nor_lost", "tests/ranks/agent/test_suspensions.py"),
)
@pytest.mark.every_slurm
def test_a_suspended_training_trains_on(place: Place, uninterrupted: list[dict]) -> None:
    """It is suspended for longer than a rank may take until its stack is written."""
    command = (*PACED, *TRAINING, "--hang-warning-s=15")
    run = launch(place, "--restarts", "3", "--hang-restart-s", "5", command=command, name="suspended")
    run.wait_for_step(6)
    suspend(place, run.job, [run.path], 30.0)
    run.completed(restarts=0)
    assert run.failures() == []
    assert run.metrics() == uninterrupted


def test_suspended_tasks_of_a_pack_are_neither_late_nor_lost(slurm: Cluster, tmp_path: Path) -> None:
    limits = ("--array", "0-1", "--pack", "2", "--time", "0:20")
    packed = start_packed(slurm, tmp_path, TASK, *limits, "--", "python", "t.py")
    logs = [packed.path(task) / "task-0.log" for task in range(2)]
    packed.wait_for(lambda: all(log.exists() and "waits" in log.read_text() for log in logs))
    for _ in range(2):  # together longer than the tasks' time limit
        suspend(packed.place, packed.job, map(packed.path, range(2)))
    (tmp_path / "go").touch()
    packed.wait_for_ends(0, 1)
    assert packed.states() == ["COMPLETED"] * 2
