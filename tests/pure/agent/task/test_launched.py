"""What starts the ranks of a node inside its task: the command alone, torchrun's agent, or what forks them."""

from __future__ import annotations

import pytest
from stand_ins import HOSTILE

from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.task import python_module, rank_command, spawn
from cluster_ddp.errors import SpecError

ENV = {
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "10071",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_NUM_NODES": "2",
    "CLUSTER_DDP_START": "3",
    "SLURMD_NODENAME": "node2",
    "CLUSTER_DDP_CPUS_PER_TASK": "5",
}
PYTHON = "/my env/bin/python"


def test_srun_starts_the_users_own_command() -> None:
    assert rank_command.launched(Options(command=("a", *HOSTILE)), ENV) == (["a", *HOSTILE], ENV)


@pytest.mark.parametrize("run_dir", ["", "/it's a run/x-71"])
def test_what_forks_the_ranks_stands_before_the_script(run_dir: str) -> None:
    asked = Options(command=("env", "A=it's", PYTHON, "-u", "train.py", *HOSTILE), launcher="fork")
    command, env = rank_command.launched(asked, {**ENV, "CLUSTER_DDP_RUN_DIR": run_dir})
    logs = [f"--log-dir={run_dir}"] if run_dir else []
    forking = ["-m", "cluster_ddp.runtime.fork", "--ranks=4", *logs, "--"]
    assert python_module.shown(command) == ["env", "A=it's", PYTHON, "-u", *forking, "train.py", *HOSTILE]
    assert env["CLUSTER_DDP_CPUS_PER_TASK"] == "5"
    with pytest.raises(SpecError, match="does not run a Python script"):
        rank_command.launched(Options(command=("bash", "x.sh"), launcher="fork"), ENV)


@pytest.mark.parametrize(("program", "python"), [(PYTHON, PYTHON), ("bash", "python")])
def test_torchruns_agent_is_run_by_the_commands_python(program: str, python: str) -> None:
    command, env = rank_command.launched(Options(command=(program, "x", *HOSTILE), launcher="torchrun"), ENV)
    assert python_module.shown(command)[:3] == [python, "-m", "torch.distributed.run"]
    assert {
        *("--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node1:10071", "--rdzv-conf=is_host=0"),
        *("--rdzv-id=71.3", "--local-addr=node2", "--max-restarts=0"),
    } <= set(command)
    inside = command[command.index("--no-python") + 1 :]
    assert "rank" in inside
    assert inside[inside.index("--") + 1 :] == [program, "x", *HOSTILE]
    assert env["OMP_NUM_THREADS"] == "5", "of each rank, since torchrun would say 1"


def test_in_a_container_torchruns_workers_look_for_its_python() -> None:
    """The host's may be nowhere in the image."""
    asked = Options(command=("python", "x.py"), launcher="torchrun", container="/i.sif")
    command, _ = rank_command.launched(asked, ENV)
    inside = command[command.index("--no-python") + 1 :]
    assert inside[:2] == ["sh", "-c"] and inside[4:] == [*spawn.agent(), "rank", "--", "python", "x.py"]


def test_words_for_a_restart_are_added_from_the_second_start_on() -> None:
    asked = Options(command=("python", "train.py"), restart_args="--resume 'my last.pth'")
    first = {**ENV, "CLUSTER_DDP_START": "0"}
    assert rank_command.launched(asked, first)[0] == ["python", "train.py"]
    assert rank_command.launched(asked, ENV)[0] == ["python", "train.py", "--resume", "my last.pth"]
    below = rank_command.launched(asked._replace(launcher="torchrun"), ENV)[0]
    assert below[-4:] == ["python", "train.py", "--resume", "my last.pth"]


def test_threads_that_the_user_has_chosen_stay() -> None:
    asked = Options(command=("python", "x.py"), launcher="torchrun")
    assert rank_command.launched(asked, {**ENV, "OMP_NUM_THREADS": "2"})[1]["OMP_NUM_THREADS"] == "2"
    here = {name: value for name, value in ENV.items() if not name.startswith(("SLURM", "CLUSTER_DDP"))}
    command, env = rank_command.launched(asked._replace(cpus_per_task=3), {**here, "CLUSTER_DDP_LOCAL_JOB_ID": "9"})
    assert env["OMP_NUM_THREADS"] == "3"
    assert {"--nnodes=1", "--rdzv-id=9.0", "--local-addr=node1"} <= set(command)
