"""The environments of a node's ranks, from that of the one task that stands for them."""

from __future__ import annotations

import pytest

from cluster_ddp.errors import TopologyError
from cluster_ddp.runtime.fork.rank_environments import NodeRanks
from cluster_ddp.slurm.port import master_port
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
}


def environ(env: dict[str, str], local_rank: int, ranks: int) -> dict[str, str]:
    changes = NodeRanks.from_environ(env, ranks).environ(local_rank, pid=99)
    return {name: value for name, value in {**env, **changes}.items() if value is not None}


def test_a_rank_has_what_srun_would_have_given_it() -> None:
    assert environ(NODE_1, 2, 3) == {
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
        "SLURM_TASK_PID": "99",
        "RANK": "5",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "1",
    }
    topology = Topology.from_environ(environ(NODE_1, 2, 3))
    assert (topology.launcher, topology.rank, topology.local_world_size) == ("slurm", 5, 3)


def test_the_cpus_per_task_are_those_that_the_job_asked_for() -> None:
    name = "CLUSTER_DDP_CPUS_PER_TASK"
    assert environ({**NODE_1, name: "2"}, 0, 3)["SLURM_CPUS_PER_TASK"] == "2"
    assert not {name, "SLURM_CPUS_PER_TASK"} & environ({**NODE_1, name: ""}, 0, 3).keys()


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
    assert environ(env, 0, 3).get("SLURM_TRES_PER_TASK") == expected


def test_what_srun_has_not_set_stays_unset() -> None:
    env = {name: value for name, value in NODE_1.items() if name not in ("SLURM_NTASKS_PER_NODE", "SLURM_GTIDS")}
    assert not {"SLURM_NTASKS_PER_NODE", "SLURM_GTIDS"} & environ(env, 0, 3).keys()


def test_without_the_template_the_ranks_meet_on_the_first_node() -> None:
    env = {name: value for name, value in NODE_1.items() if not name.startswith("MASTER_")}
    rank = environ(env, 0, 3)
    assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("node1", str(master_port(71)))


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, ("1", "2", "0", "127.0.0.1")),
        (
            {"WORLD_SIZE": "4", "NODE_RANK": "1", "MASTER_ADDR": "h0"},
            ("3", "4", "1", "h0"),
        ),  # a container strips SLURM_*
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "h0"}, ("1", "2", "0", "h0")),
    ],
)
def test_outside_a_step(env: dict[str, str], place: tuple[str, ...]) -> None:
    rank = environ(env, 1, 2)
    assert tuple(rank[name] for name in ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")) == place
    assert not [name for name in rank if name.startswith("SLURM")]


def test_submitits_local_executor() -> None:
    """Started from inside a Slurm job, too."""
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"}
    local |= {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_JOB_ID": "4711", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    topology = Topology.from_environ(environ({**NODE_1, **local}, 1, 2))
    assert (topology.launcher, topology.rank, topology.world_size) == ("submitit-local", 1, 2)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({**NODE_1, "SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS=6, SLURM_STEP_NUM_NODES=2"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"WORLD_SIZE": "3", "NODE_RANK": "1"}, "NODE_RANK=1"),
    ],
)
def test_what_does_not_fit_is_told(env: dict[str, str], found: str) -> None:
    with pytest.raises(TopologyError, match=found):
        NodeRanks.from_environ(env, 3)
