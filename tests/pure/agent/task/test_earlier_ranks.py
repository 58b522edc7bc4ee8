"""agent.task.task: ranks of an earlier start on this node are killed, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp.agent.task import task
from cluster_ddp.errors import JobError

TASK = {
    "CLUSTER_DDP_SECRET": f"it's {os.getpid()}",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "node 7",
    "CLUSTER_DDP_START": "2",
}
RANK = {**TASK, "CLUSTER_DDP_NOTES": "/notes"}
EARLIER = {**RANK, "CLUSTER_DDP_START": "1"}


def test_on_this_machine_a_place_is_a_local_rank() -> None:
    """Also where that machine is in a step of Slurm, which all tasks have in common."""
    here = {**TASK, "CLUSTER_DDP_LOCAL_JOB_ID": "7", "LOCAL_RANK": "1"}
    earlier = {**EARLIER, "CLUSTER_DDP_LOCAL_JOB_ID": "7", "LOCAL_RANK": "1"}
    other = subprocess.Popen(["sleep", "600"], env={**earlier, "LOCAL_RANK": "0"})
    victims = [subprocess.Popen(["sleep", "600"], env=earlier) for _ in range(2)]
    try:
        for names in ((), ("SLURM_LOCALID", "SLURMD_NODENAME")):
            task.kill_earlier_ranks({name: value for name, value in here.items() if name not in names})
        assert [one.wait(timeout=scaled(LIMIT_S)) for one in victims] == [-signal.SIGKILL] * 2
        assert other.poll() is None
    finally:
        for one in (other, *victims):
            one.kill()
            one.wait()


def test_ranks_of_earlier_starts_are_killed_and_nobody_else() -> None:
    others = {
        "of this start": RANK,
        "in another place": {**EARLIER, "SLURM_LOCALID": "0"},
        "on another node": {**EARLIER, "SLURMD_NODENAME": "node 8"},  # the sandbox' nodes are one machine
        "of another job": {**EARLIER, "CLUSTER_DDP_SECRET": "another"},
        "an agent": {**TASK, "CLUSTER_DDP_START": "1"},
    }
    started = {name: subprocess.Popen(["sleep", "600"], env=env) for name, env in others.items()}
    victims = [subprocess.Popen(["sleep", "600"], env={**EARLIER, "CLUSTER_DDP_START": start}) for start in "01"]
    try:
        task.kill_earlier_ranks(TASK)
        assert [one.wait(timeout=scaled(LIMIT_S)) for one in victims] == [-signal.SIGKILL] * 2
        assert [name for name, one in started.items() if one.poll() is not None] == []
    finally:
        for one in (*started.values(), *victims):
            one.kill()
            one.wait()


def test_one_that_does_not_end_is_the_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that waits for a driver: here the signal does not arrive."""
    monkeypatch.setattr(task, "PATIENCE_S", 0.2)
    one = subprocess.Popen(["sleep", "600"], env=EARLIER)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, number: None)
            with pytest.raises(JobError, match=f"process {one.pid} of an earlier start does not end within 0.2 s"):
                task.kill_earlier_ranks(TASK)
    finally:
        one.kill()
        one.wait()
