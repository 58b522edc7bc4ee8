"""The environments of a node's ranks, from that of the one task that stands for them."""

from __future__ import annotations

import pytest

from cluster_ddp.agent.task import node_ranks
from cluster_ddp.slurm.topology import Topology

# The second of two nodes, as srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=6 sets it for its task (22.05).
NODE_1 = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "1",
    "SLURM_TASK_PID": "5",
    "SLURM_GPUS_ON_NODE": "3",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "10071",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "3",
    "NODE_RANK": "1",
}


def test_a_rank_has_what_srun_would_have_given_it() -> None:
    assert node_ranks.environment(NODE_1, 2) == {
        **NODE_1,
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "2",
        "SLURM_NTASKS": "6",
        "SLURM_NPROCS": "6",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
        "SLURM_TASKS_PER_NODE": "3(x2)",
        "SLURM_NTASKS_PER_NODE": "3",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_GTIDS": "3,4,5",
        "RANK": "5",
        "LOCAL_RANK": "2",
    }
    topology = Topology.from_environ(node_ranks.environment(NODE_1, 2))
    assert (topology.launcher, topology.rank, topology.local_world_size) == ("slurm", 5, 3)


def test_the_cpus_per_task_are_those_that_the_job_asked_for() -> None:
    name = "CLUSTER_DDP_CPUS_PER_TASK"
    assert node_ranks.environment({**NODE_1, name: "2"}, 0)["SLURM_CPUS_PER_TASK"] == "2"
    assert not {name, "SLURM_CPUS_PER_TASK"} & node_ranks.environment({**NODE_1, name: ""}, 0).keys()


@pytest.mark.parametrize(
    ("said", "tres", "expected"),
    [
        ("2", "cpu=6", "cpu=2"),
        ("2", "cpu:6,gres/gpu=1", "cpu:2,gres/gpu=1"),
        ("", "cpu=3", None),
        ("", "cpu=3,gres/gpu=1", "gres/gpu=1"),
    ],
)
def test_the_cpus_per_task_are_repeated_elsewhere(said: str, tres: str, expected: str | None) -> None:
    """By Slurm 23.11 and later."""
    env = {**NODE_1, "CLUSTER_DDP_CPUS_PER_TASK": said, "SLURM_TRES_PER_TASK": tres}
    assert node_ranks.environment(env, 0).get("SLURM_TRES_PER_TASK") == expected


def test_what_srun_has_not_set_stays_unset() -> None:
    env = {name: value for name, value in NODE_1.items() if name not in ("SLURM_NTASKS_PER_NODE", "SLURM_GTIDS")}
    assert not {"SLURM_NTASKS_PER_NODE", "SLURM_GTIDS"} & node_ranks.environment(env, 0).keys()


def test_submitits_local_executor() -> None:
    """Started from inside a Slurm job, too."""
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"}
    local |= {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_JOB_ID": "4711"}
    local |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "h"}
    topology = Topology.from_environ(node_ranks.environment({**NODE_1, **local}, 1))
    assert (topology.launcher, topology.rank, topology.world_size) == ("submitit-local", 1, 2)


@pytest.mark.parametrize(
    ("cpus", "ranks", "env", "shares"),
    [
        ({0, 1, 2, 3}, 2, {}, [{0, 1}, {2, 3}]),
        ({0, 1, 2, 3}, 3, {}, [{0}, {1}, {2, 3}]),
        ({0, 1}, 4, {}, [{0, 1}] * 4),
        ({0, 1, 2, 3}, 2, {"SLURM_CPUS_ON_NODE": "4"}, [{0, 1}, {2, 3}]),
        ({0, 1, 2, 3}, 2, {"SLURM_CPUS_ON_NODE": "2"}, [{0, 1, 2, 3}] * 2),
    ],
)
def test_cpus_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int], ranks: int, env: dict[str, str], shares: list[set[int]]
) -> None:
    monkeypatch.setattr(node_ranks, "_place", lambda cpu: (0, cpu, cpu))
    assert [node_ranks.share_of_cpus(cpus, rank, ranks, env) for rank in range(ranks)] == shares


def test_the_threads_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_ranks, "_place", lambda cpu: (0, cpu % 2, cpu))  # CPUs 0 and 2 are of the same core
    assert [node_ranks.share_of_cpus({0, 1, 2, 3}, rank, 2, {}) for rank in (0, 1)] == [{0, 2}, {1, 3}]
