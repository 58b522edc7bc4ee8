"""Whole environments in, Topology out."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_ddp.errors import ClusterDDPError, TopologyError
from cluster_ddp.slurm.port import candidates
from cluster_ddp.slurm.topology import Topology

# What Slurm 22.05 sets in task 3 of a 2x2 job's second step (seen), shortened to what matters.
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_DISTRIBUTION": "block",
}
BATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def place(**fields: Any) -> dict[str, Any]:
    return fields


GOOD = {
    "a step": (
        STEP,
        place(
            launcher="slurm",
            rank=3,
            local_rank=1,
            world_size=4,
            local_world_size=2,
            node_rank=1,
            num_nodes=2,
            nodes=("node1", "node2"),
            tasks_per_node=(2, 2),
            master_addr="node1",
            port_candidates=candidates(71, 1),
            job_id=71,
            step_id=1,
            restart_count=0,
            gpus_on_node=2,
        ),
    ),
    "everything else that Slurm tells": (
        STEP
        | {
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_RESTART_COUNT": "2",
            "SLURM_CPUS_PER_TASK": "8",
            "SLURM_JOB_END_TIME": "odd",  # stop_agreement reads it, and needs none
        },
        place(
            array_job_id=70,
            array_task_id=3,
            restart_count=2,
            cpus_per_task=8,
            job_label="70_3",
        ),
    ),
    "a start in the allocation after a requeue": (
        STEP | {"CLUSTER_DDP_START": "3", "SLURM_RESTART_COUNT": "1"},
        place(restart_count=3),
    ),
    "several GPUs for each task": (
        without(STEP, "SLURM_LOCALID", "SLURM_NODEID")
        | {"SLURM_GPUS_ON_NODE": "4", "CLUSTER_DDP_GPUS_PER_TASK": "2"},
        place(local_rank=1, node_rank=1, local_world_size=2, gpus_on_node=4, gpus_per_task=2),
    ),
    "several GPUs for each of torchrun's workers": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "CLUSTER_DDP_GPUS_PER_TASK": "2"},
        place(local_rank=1, gpus_per_task=2),
    ),
    "several GPUs for a single process": ({"CLUSTER_DDP_GPUS_PER_TASK": "2"}, place(rank=0, gpus_per_task=2)),
    "cyclic distribution": (
        STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_DISTRIBUTION": "cyclic"},
        place(rank=2, local_rank=1, node_rank=0),
    ),
    "unequal nodes without GPUs": (
        without(STEP, "SLURM_GPUS_ON_NODE")
        | {
            "SLURM_STEP_NUM_TASKS": "7",
            "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
            "SLURM_STEP_NODELIST": "n[1-4]",
            "SLURM_PROCID": "6",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "3",
        },
        place(rank=6, local_rank=0, local_world_size=1, node_rank=3, num_nodes=4, tasks_per_node=(2, 2, 2, 1)),
    ),
    "a step on part of the nodes": (
        STEP
        | {
            "SLURM_STEP_NODELIST": "node2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_PROCID": "1",
            "SLURM_NODEID": "0",
        },
        place(rank=1, world_size=2, num_nodes=1, nodes=("node2",), master_addr="node2"),
    ),
    "the variables of torchrun beside it, as our templates export them": (
        STEP
        | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}
        | {"MASTER_PORT": str(candidates(71, 1)[2])},
        place(rank=3, master_addr="node1", port_candidates=candidates(71, 1)[2:] + candidates(71, 1)[:2]),
    ),
    "the port that the batch script found for its first step, in the second": (
        STEP | {"MASTER_PORT": str(candidates(71)[1])},
        place(port_candidates=candidates(71)[1:] + candidates(71)[:1]),
    ),
    "a preset address and port": (
        STEP | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4242"},
        place(master_addr="10.0.0.9", port_candidates=(4242,), master_port=4242),
    ),
    "a container that strips SLURM_LOCALID": (
        without(STEP, "SLURM_LOCALID", "SLURM_NODEID"),
        place(rank=3, local_rank=1, node_rank=1),
    ),
    "a container that keeps only the job's variables": (
        {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "9"}
        | {"SLURM_JOB_NODELIST": "a[1-2]"},
        place(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1, master_addr="a1"),
    ),
    "the batch shell of a job with one task": (
        BATCH | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node7"},
        place(launcher="slurm", rank=0, world_size=1, job_id=71, nodes=("node7",)),
    ),
    "one task in the batch shell of 26.11, whose step id is -5": (
        BATCH | {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "-5"},
        place(launcher="slurm", rank=0, world_size=1, step_id=None),
    ),
    "torchrun": (
        {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x"}
        | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"},
        place(
            launcher="torchrun",
            rank=5,
            local_rank=1,
            world_size=8,
            node_rank=1,
            num_nodes=2,
            port_candidates=candidates(29400),
            restart_count=1,
            agent_restarts=1,
        ),
    ),
    "torchrun under Slurm": (
        BATCH
        | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_ID": "0"}
        | {"CLUSTER_DDP_START": "2", "TORCHELASTIC_RESTART_COUNT": "1"},
        place(
            launcher="torchrun",
            rank=1,
            world_size=4,
            job_id=71,
            restart_count=3,
            agent_restarts=1,
            port_candidates=(29400,),
        ),
    ),
    "torchrun's agent with the CPUs of its two workers": (
        BATCH
        | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x", "SLURM_CPUS_PER_TASK": "16"},
        place(launcher="torchrun", rank=1, world_size=4, job_id=71, cpus_per_task=8),
    ),
    "hand-set on one node": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        place(launcher="manual", rank=1, node_rank=0, num_nodes=1, master_addr="127.0.0.1", master_port=29500),
    ),
    "a job on this machine, without Slurm": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        | {"CLUSTER_DDP_LOCAL_JOB_ID": "4711", "MASTER_PORT": str(candidates(4711)[0])},
        place(launcher="manual", rank=1, node_rank=0, num_nodes=1, job_id=4711, port_candidates=candidates(4711)),
    ),
    "hand-set with an address": (
        {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h1", "MASTER_PORT": "1234"},
        place(launcher="manual", local_world_size=None, num_nodes=None, master_addr="h1", master_port=1234),
    ),
    "hand-set in the batch shell": (
        BATCH | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
        place(launcher="manual", rank=1, job_id=71),
    ),
    "a launcher of the user's own inside each task": (
        STEP | {"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h"},
        place(launcher="manual", rank=6, world_size=16, num_nodes=4),
    ),
    "submitit's local executor, inside a Slurm job": (
        BATCH
        | {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1"}
        | {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": "4711"},
        place(launcher="submitit-local", rank=1, world_size=2, job_id=4711, port_candidates=candidates(4711)),
    ),
    "no launcher at all": ({}, place(launcher="single", rank=0, world_size=1, num_nodes=1, job_label=None)),
    "empty values count as unset": ({"RANK": "", "WORLD_SIZE": ""}, place(launcher="single")),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_finds_the_place(name: str) -> None:
    env, expected = GOOD[name]
    topology = Topology.from_environ(env)
    assert {field: getattr(topology, field) for field in expected} == expected


BAD = {
    "in the batch shell without srun": (BATCH, ["SLURM_NTASKS=4", "SLURM_STEP_ID unset"], "srun python"),
    "the same on 26.11": (BATCH | {"SLURM_STEP_ID": "-5"}, ["SLURM_STEP_ID=-5"], "srun"),
    "in salloc's shell": (
        {"SLURM_JOB_ID": "3", "SLURM_JOB_NUM_NODES": "2"},
        ["SLURM_JOB_NUM_NODES=2", "SLURM_NTASKS unset"],
        "srun",
    ),
    "in salloc's shell, where SLURM_NTASKS is not set": (
        {"SLURM_JOB_ID": "3", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2"},
        ["the job has 2 tasks"],
        "srun",
    ),
    "a container that leaves no trace of the nodes": (
        {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
        | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        ["MASTER_ADDR unset"],
        "export MASTER_ADDR",
    ),
    "a container that leaves neither nodes nor tasks per node": (
        {"SLURM_JOB_ID": "3", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"},
        ["MASTER_ADDR unset"],
        "export MASTER_ADDR",
    ),
    "RANK from the batch shell": (STEP | {"RANK": "0"}, ["RANK=0", "SLURM_PROCID=3"], "unset RANK"),
    "a whole world from the batch shell": (
        STEP | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        ["RANK=0", "SLURM_PROCID=3"],
        "unset RANK",
    ),
    "LOCAL_RANK from the batch shell": (STEP | {"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "SLURM_LOCALID=1"], "unset"),
    "WORLD_SIZE of another step": (STEP | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"], "unset"),
    "more tasks than GPUs": (
        STEP | {"SLURM_GPUS_ON_NODE": "1"},
        ["SLURM_GPUS_ON_NODE=1", "SLURM_STEP_TASKS_PER_NODE=2(x2)", "more tasks"],
        "--ntasks-per-node=1 --gres=gpu:1",
    ),
    "fewer tasks than GPUs": (
        STEP | {"SLURM_GPUS_ON_NODE": "4"},
        ["SLURM_GPUS_ON_NODE=4", "fewer tasks"],
        "--ntasks-per-node=4 --gres=gpu:4; for a model over several GPUs: export CLUSTER_DDP_GPUS_PER_TASK=2",
    ),
    "several GPUs for each task, and too few": (
        STEP | {"SLURM_GPUS_ON_NODE": "2", "CLUSTER_DDP_GPUS_PER_TASK": "2"},
        ["SLURM_GPUS_ON_NODE=2", "CLUSTER_DDP_GPUS_PER_TASK=2: more tasks than GPUs"],
        "--ntasks-per-node=1 --gres=gpu:2",
    ),
    "RANK alone": ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE unset"], "torchrun"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, ["RANK unset", "WORLD_SIZE=2"], "srun"),
    "LOCAL_RANK missing": ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK unset"], "all three"),
    "rank outside the world": (STEP | {"SLURM_PROCID": "4"}, ["rank=4", "world_size=4"], "env | grep"),
    "hand-set rank outside the world": (
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h"},
        ["rank=2", "world_size=2"],
        "env | grep",
    ),
    "a rank that is no number": (STEP | {"SLURM_PROCID": "x"}, ["SLURM_PROCID=x"], "env | grep SLURM_PROCID"),
    "an unreadable node list": (
        STEP | {"SLURM_STEP_NODELIST": "node[1-"},
        ["'['"],
        "scontrol show hostnames",
    ),
    "unreadable tasks per node": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["2(y2)"], "TASKS_PER_NODE"),
    "several nodes and no list of them": (
        without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        ["MASTER_ADDR unset", "SLURM_STEP_NODELIST unset"],
        "export MASTER_ADDR",
    ),
    "hand-set, perhaps on several nodes, and no address": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        ["MASTER_ADDR unset", "WORLD_SIZE=2"],
        "LOCAL_WORLD_SIZE=$WORLD_SIZE",
    ),
    "a port that is none": (STEP | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"], "unset MASTER_PORT"),
    "no local rank and none to derive": (
        without(STEP, "SLURM_LOCALID") | {"SLURM_DISTRIBUTION": "cyclic"},
        ["SLURM_LOCALID unset", "SLURM_DISTRIBUTION=cyclic"],
        "pass SLURM_LOCALID",
    ),
    "no local rank on unequal nodes": (
        without(STEP, "SLURM_LOCALID") | {"SLURM_STEP_TASKS_PER_NODE": "3,1"},
        ["SLURM_LOCALID unset", "SLURM_STEP_TASKS_PER_NODE=3,1"],
        "pass SLURM_LOCALID",
    ),
    "the address of the job in a step elsewhere": (
        STEP
        | {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        | {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "MASTER_ADDR": "node1"},
        ["MASTER_ADDR=node1", "SLURM_STEP_NODELIST=node2"],
        "unset MASTER_ADDR",
    ),
    "no number of tasks": (
        {"SLURM_PROCID": "2", "SLURM_JOB_ID": "1"},
        ["SLURM_STEP_NUM_TASKS unset", "SLURM_PROCID=2"],
        "WORLD_SIZE",
    ),
    "half of submitit's variables": (
        {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1"},
        ["SUBMITIT_LOCAL_NTASKS unset"],
        "submitit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_names_the_variables_and_a_way_out(name: str) -> None:
    env, mentioned, hint = BAD[name]
    with pytest.raises(ClusterDDPError) as caught:
        Topology.from_environ(env)
    for text in mentioned:
        assert text in caught.value.found
    assert hint in caught.value.hint


def test_never_meets_on_localhost_with_more_than_one_node() -> None:
    for name, (env, _) in GOOD.items():
        topology = Topology.from_environ(env)
        if topology.num_nodes != 1:
            assert topology.master_addr not in ("localhost", "127.0.0.1"), name


def test_the_key_tells_runs_apart() -> None:
    changes: list[dict[str, str]] = [
        {},
        {"SLURM_JOB_ID": "72"},
        {"SLURM_STEP_ID": "2"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_RESTART_COUNT": "1", "CLUSTER_DDP_START": "2"},
        {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"},
        {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "2"},
    ]
    keys = [Topology.from_environ(STEP | change).key for change in changes]
    assert len(set(keys)) == len(keys)
    ranks = [Topology.from_environ(STEP | {"SLURM_PROCID": str(rank)}).key for rank in range(4)]
    assert len(set(ranks)) == 1


def test_the_environment_is_only_read() -> None:
    env = dict(STEP)
    Topology.from_environ(env)
    assert env == STEP


def test_a_topology_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(TopologyError, match="local_rank=2 does not fit local_world_size=2"):
        Topology(
            launcher="manual",
            rank=0,
            local_rank=2,
            world_size=4,
            local_world_size=2,
            master_addr="h",
            port_candidates=(1,),
        )
