"""What starts the ranks of a node inside its task: the command alone, or what forks them."""

from __future__ import annotations

import pytest
from stand_ins import HOSTILE

from cluster_ddp.agent.launch_options import Options
from cluster_ddp.agent.task import python_module, rank_command
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


def test_words_for_a_restart_are_added_from_the_second_start_on() -> None:
    asked = Options(command=("python", "train.py"), restart_args="--resume 'my last.pth'")
    first = {**ENV, "CLUSTER_DDP_START": "0"}
    assert rank_command.launched(asked, first)[0] == ["python", "train.py"]
    assert rank_command.launched(asked, ENV)[0] == ["python", "train.py", "--resume", "my last.pth"]
    below = rank_command.launched(asked._replace(launcher="fork"), ENV)[0]
    assert below[-3:] == ["train.py", "--resume", "my last.pth"]
