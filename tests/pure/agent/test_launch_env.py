"""The environment of the ranks, from environments as Slurm makes them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cluster_ddp.agent import launch_env
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.errors import RendezvousError, SpecError, TopologyError
from cluster_ddp.slurm.port import candidates

SRUN, FORK = AgentOptions(), AgentOptions(launcher="fork")
SIZE = launch_env.Shape(nodes=2, ranks_per_node=2, node_cpus=None, cpus_per_task=None)
JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURMD_NODENAME": "localhost"}


@pytest.mark.parametrize(
    ("env", "options", "shape"),
    [
        # As `submit` asks: a task for each rank.
        ({"SLURM_NTASKS_PER_NODE": "2"}, SRUN, (2, 2, None, None)),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "4"}, AgentOptions(gpus_per_task=2), (2, 2, None, None)),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3"}, SRUN, (2, 4, 12, 3)),
        # One task on a node with several GPUs, as launchers of one process per node ask: a rank for each GPU, or two.
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32"}, SRUN, (2, 4, 32, 8)),
        (
            {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4"},
            AgentOptions(gpus_per_task=2),
            (2, 2, None, None),
        ),
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}, SRUN, (2, 8, 4, 1)),
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "4"}, AgentOptions(ranks_per_node=1), (2, 1, None, None)),
        ({"SLURM_NTASKS_PER_NODE": "1"}, SRUN, (2, 1, None, None)),
        ({"SLURM_NTASKS_PER_NODE": "1"}, AgentOptions(ranks_per_node=4), (2, 4, None, None)),
        # Two tasks and four GPUs: the tasks are meant.
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "4"}, SRUN, (2, 2, None, None)),
        # sbatch's options have changed the job; the number of tasks per node was not given.
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3(x2)"}, SRUN, (2, 3, None, None)),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, AgentOptions(ranks_per_node=2), (2, 2, None, None)),
        # --exclusive without tasks: Slurm counts CPUs.
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "2"}, SRUN, (2, 2, None, None)),
        ({"SLURM_TASKS_PER_NODE": "8,4"}, SRUN, (2, 1, None, None)),
        # CPUs: on the node that has the fewest, if none were asked for (DefCpuPerGPU, or whole nodes).
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}, FORK, (2, 2, 2, None)),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "128(x2),16(x3),32"}, FORK, (2, 2, 16, None)),
        (
            {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"},
            FORK,
            (2, 2, 6, 3),
        ),
        ({"SLURM_JOB_NUM_NODES": "", "SLURM_NTASKS_PER_NODE": "2"}, SRUN, (1, 2, None, None)),
    ],
)
def test_the_shape_of_a_job(env: dict[str, str], options: AgentOptions, shape: tuple[int | None, ...]) -> None:
    found = launch_env.shape(options, {"SLURM_JOB_NUM_NODES": "2", **env})
    assert found[:4] == shape
    assert found.world_size == found.nodes * found.ranks_per_node
    gpus = env.get("SLURM_GPUS_ON_NODE")
    assert found.gpus_per_node == (None if gpus is None else int(gpus))


@pytest.mark.parametrize(
    ("env", "on_node", "of_task"),
    [
        ({"SLURM_GPUS_PER_TASK": "2"}, 4, 2),  # in salloc, where nothing else says it
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 4, 2),
        ({"SLURM_GPUS_PER_TASK": "a100", "SLURM_GPUS_ON_NODE": "2"}, 2, 1),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=3,license/x=9"}, 6, 3),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, None, 0),
    ],
)
def test_gpus_that_were_asked_for_each_task(env: dict[str, str], on_node: int | None, of_task: int) -> None:
    found = launch_env.shape(SRUN, {**JOB, **env})
    assert (found.gpus_per_node, found.gpus_per_task) == (on_node, of_task)


def test_spare_nodes_take_no_ranks() -> None:
    assert launch_env.shape(AgentOptions(spare_nodes=1), {**JOB, "SLURM_JOB_NUM_NODES": "3"}).world_size == 4
    with pytest.raises(SpecError, match=r"the job has 2 node\(s\), and 2 of them are to be spares") as error:
        launch_env.shape(AgentOptions(spare_nodes=2), JOB)
    assert "--spare-nodes" in error.value.hint


@pytest.mark.parametrize("counts", ["2,1", "1,2(x3)"])
def test_unequal_tasks_are_refused(counts: str) -> None:
    with pytest.raises(SpecError, match="not equal on all nodes") as error:
        launch_env.shape(SRUN, {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": counts})
    assert f"SLURM_TASKS_PER_NODE={counts}" in error.value.found
    assert "--ranks-per-node" in error.value.hint


TWO_NODES = {"SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "localhost"}


@pytest.mark.parametrize(
    ("env", "each"),
    [
        # What 22.05 sets with --ntasks and --ntasks-per-node, and what srun starts then.
        ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}, 1),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "3(x2)"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}, 2),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "8(x2)"}, 1),  # a task for each CPU: none was asked for
        # salloc --ntasks-per-node=1, and in it sbatch --ntasks=4
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}, 2),
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_OVERCOMMIT": "1"}, 4),
    ],
)
def test_as_many_ranks_start_as_the_job_has_tasks(env: dict[str, str], each: int) -> None:
    assert launch_env.shape(SRUN, {**TWO_NODES, **env}).ranks_per_node == each


def test_tasks_that_do_not_fit_the_nodes_are_refused() -> None:
    env = {**TWO_NODES, "SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    with pytest.raises(SpecError, match="not equal on all nodes, but 2 and 1: SLURM_NTASKS=3, SLURM_JOB_NUM_NODES=2"):
        launch_env.shape(SRUN, env)


def test_variables_that_contradict_each_other_are_both_shown() -> None:
    env = {**TWO_NODES, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "1(x2)"}
    with pytest.raises(TopologyError, match=r"SLURM_NTASKS=8, SLURM_TASKS_PER_NODE=1\(x2\): they contradict"):
        launch_env.shape(SRUN, env)
    assert launch_env.shape(AgentOptions(ranks_per_node=2), env).world_size == 4


@pytest.mark.fault(
    "`launch` in a heterogeneous job, or in a job whose variables contradict each other",
    "refused; the error shows the variables",
    bound="at once",
    also=("test_variables_that_contradict_each_other_are_both_shown",),
)
def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(SpecError, match="SLURM_HET_SIZE=2: it is a heterogeneous job"):
        launch_env.shape(SRUN, {**JOB, "SLURM_HET_SIZE": "2"})
    assert launch_env.shape(SRUN, {**JOB, "SLURM_HET_SIZE": "1"}).world_size == 4


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(TopologyError, match=r"SLURM_JOB_NUM_NODES=two"):
        launch_env.shape(SRUN, {"SLURM_JOB_NUM_NODES": "two"})


def test_the_run_directory_has_the_jobs_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch_env.run_dir(SRUN, "12") is None
    assert launch_env.run_dir(AgentOptions(run_dir="/it's/x-%j"), "12_3") == Path("/it's/x-12_3")
    assert launch_env.run_dir(AgentOptions(run_dir="/it's/x_%a"), "12_3") == Path("/it's/x_3")
    assert launch_env.run_dir(AgentOptions(run_dir="x"), "12") == tmp_path / "x"


def test_what_a_job_on_slurm_gives_its_tasks() -> None:
    found = launch_env.on_slurm(AgentOptions(run_dir="/r/x-%j", launcher="srun"), SIZE, "71")
    assert len(bytes.fromhex(found.pop("CLUSTER_DDP_SECRET"))) == 32
    for name in ("PYTHONUNBUFFERED", "PYTHONHASHSEED"):
        found.pop(name, None)
    assert found == {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "SLURM_EXPORT_ENV": "ALL",
        "CLUSTER_DDP_RUN_DIR": "/r/x-71",
        "CLUSTER_DDP_RESUME": "the same command with --run-dir /r/x-71",
    }
    again = launch_env.on_slurm(SRUN, SIZE, "71")
    assert again["CLUSTER_DDP_SECRET"] != launch_env.on_slurm(SRUN, SIZE, "71")["CLUSTER_DDP_SECRET"]
    assert "CLUSTER_DDP_RUN_DIR" not in again


def test_each_start_meets_on_another_port_where_rank_0_is() -> None:
    hosts = enumerate(("localhost", "127.0.0.2"))
    found = [launch_env.of_start({"SLURM_JOB_ID": "71"}, host, start) for start, host in hosts]
    assert [(one["CLUSTER_DDP_START"], one["MASTER_ADDR"]) for one in found] == [("0", "localhost"), ("1", "127.0.0.2")]
    ports = {int(one["MASTER_PORT"]) for one in found}
    assert len(ports) == 2 and ports <= {*candidates(71)}
    last = launch_env.of_start({"SLURM_JOB_ID": "71"}, "localhost", len(candidates(71)))
    assert last["MASTER_PORT"] == found[0]["MASTER_PORT"], "the candidates begin anew"


@pytest.mark.parametrize(("cpus", "said"), [(3, "3"), (None, "")])
def test_the_ranks_of_a_nodes_task_learn_their_own_cpus(cpus: int | None, said: str) -> None:
    """The step's are those of all ranks of the node."""
    size = SIZE._replace(cpus_per_task=cpus)
    assert launch_env.on_slurm(FORK, size, "71")["CLUSTER_DDP_CPUS_PER_TASK"] == said
    assert "CLUSTER_DDP_CPUS_PER_TASK" not in launch_env.on_slurm(SRUN, size, "71")


def test_options_that_ranks_learn_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AgentOptions(gpus_per_task=2, hang_restart_s=30, track=("tensorboard", "wandb"), share=True)
    for name in ("PYTHONUNBUFFERED", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "it's a run"
    folder.mkdir()
    found = launch_env.common(asked, folder)
    assert {name: found[name] for name in found if name not in ("CLUSTER_DDP_SECRET", "CLUSTER_DDP_RUN_DIR")} == {
        **{"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"},
        "CLUSTER_DDP_GPUS_PER_TASK": "2",
        "CLUSTER_DDP_HANG_RESTART_S": "30",
        "CLUSTER_DDP_TRACK": "tensorboard wandb",
        "CLUSTER_DDP_SHARE": "1",
        "CLUSTER_DDP_RESUME": f"the same command with --run-dir '{tmp_path}/it'\"'\"'s a run'",
    }
    (folder / "spec.json").touch()  # made by `submit`, which can resume it
    resume = launch_env.common(SRUN, folder)["CLUSTER_DDP_RESUME"]
    assert resume == f"cluster-ddp submit --resume '{tmp_path}/it'\"'\"'s a run'"
    for name in ("PYTHONUNBUFFERED", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "")
        assert name not in launch_env.common(SRUN, folder), "the user's own choice"
    assert set(launch_env.common(SRUN, None)) == {"CLUSTER_DDP_SECRET"}


STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}


@pytest.mark.parametrize(
    ("env", "options", "found"),
    [
        (STEP, SRUN, {"RANK": "3", "LOCAL_RANK": "1", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2,3"}, SRUN, {"LOCAL_WORLD_SIZE": "3"}),
        (STEP, FORK, {"NODE_RANK": "1"}),
        (
            STEP,
            AgentOptions(function=True),
            {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_LOG_LEVEL": "CRITICAL", "RANK": "3"},
        ),
    ],
)
def test_what_a_task_adds(env: dict[str, str], options: AgentOptions, found: dict[str, str]) -> None:
    added = launch_env.of_task(options, env)
    assert {name: added.get(name) for name in found} == found
    assert ("RANK" in added) == (options.launcher == "srun")
    assert ("SUBMITIT_EXECUTOR" in added) == options.function


def test_what_a_job_on_this_machine_gives_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SUBMITIT_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    found = launch_env.on_this_machine(AgentOptions(gpus_per_task=2, cpus_per_task=3), 2, 0)
    assert int(found.pop("MASTER_PORT")) in candidates(os.getpid())
    assert found == {
        "CLUSTER_DDP_LOCAL_JOB_ID": str(os.getpid()),
        "CLUSTER_DDP_START": "0",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "OMP_NUM_THREADS": "3",
    }
    assert launch_env.of_local_rank(SRUN, 1) == {"RANK": "1", "LOCAL_RANK": "1"}
    assert launch_env.on_this_machine(FORK, 2, 1)["CLUSTER_DDP_START"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    mine = launch_env.on_this_machine(SRUN, 2, 0)
    assert (mine["CUDA_VISIBLE_DEVICES"], mine["OMP_NUM_THREADS"]) == ("5", "7")


def test_cpus_are_shared_out_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    assert launch_env.on_this_machine(SRUN, 2, 0)["OMP_NUM_THREADS"] == "2"
    assert launch_env.on_this_machine(SRUN, 9, 0)["OMP_NUM_THREADS"] == "1"


def test_submitits_variables_on_this_machine() -> None:
    asked = AgentOptions(function=True)
    found = launch_env.on_this_machine(asked, 2, 0)
    assert (found["SUBMITIT_EXECUTOR"], found["SUBMITIT_LOCAL_NTASKS"]) == ("local", "2")
    assert found["SUBMITIT_LOCAL_JOB_ID"] == str(os.getpid())
    own = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_LOCALID": "1"}
    assert launch_env.of_local_rank(asked, 1) == {"RANK": "1", "LOCAL_RANK": "1", **own}


@pytest.mark.parametrize("job_id", [0, 71, 22750, 22751, 4_294_967_295])
def test_a_port_on_which_something_listens_is_not_chosen(job_id: int) -> None:
    """Not where the first candidate is in use."""
    env = {"SLURM_JOB_ID": str(job_id)}
    first = int(launch_env.of_start(env, "localhost", 0)["MASTER_PORT"])
    assert first in candidates(job_id)
    with socket.create_server(("127.0.0.1", first)):
        second = int(launch_env.of_start(env, "localhost", 0)["MASTER_PORT"])
    assert second in candidates(job_id) and second != first


def test_if_all_ports_are_in_use_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setattr(launch_env.port, "candidates", lambda job_id, place=0: [held.getsockname()[1]])
        with pytest.raises(RendezvousError, match="all 1 candidate ports are in use") as error:
            launch_env.of_start(JOB, "localhost", 0)
    assert "ssh localhost ss -ltn" in error.value.hint
