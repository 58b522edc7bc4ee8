"""Which job a shell belongs to, with a squeue that stands in for Slurm's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster_ddp.agent.job import inherited_env
from cluster_ddp.run.names import OF_A_JOB

OF_PARENT = {
    "SLURM_ARRAY_JOB_ID": "16",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_RESTART_COUNT": "2",
}
OF_TASK = {**OF_PARENT, "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ("17 17 N/A 0", {"SLURM_RESTART_COUNT": "0"}),  # submitted by task 3 of array 16
        ("16 16 4-7 0\n17 16 3 1", OF_TASK),
        ("", OF_PARENT),  # Slurm does not answer
        ("18 18 N/A 0", OF_PARENT),  # it speaks of another job
    ],
)
def test_the_array_of_the_job_that_has_submitted_this_one_is_not_its(
    tmp_path: Path, said: str, own: dict[str, str]
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n")
    (tmp_path / "squeue").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    assert inherited_env.own({**env, **OF_PARENT}) == {**env, **own}


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "17"},
        {"SLURM_JOB_ID": "17", "SLURM_CPU_BIND": "cores", "CLUSTER_DDP_RUN_DIR": "/r", "CLUSTER_DDP_TRACK": "wandb"},
        {"CLUSTER_DDP_SHARE": "1", "SLURM_RESTART_COUNT": "2"},
    ],
)
def test_a_shell_that_inherits_nothing_keeps_all_and_asks_nobody(env: dict[str, str]) -> None:
    env = {"PATH": "/nowhere", **env}
    assert inherited_env.own(env) == env


def test_what_a_job_of_ours_has_set_for_its_ranks_is_not_the_next_ones() -> None:
    of_rank = dict.fromkeys([*OF_A_JOB, "RANK", "TORCHELASTIC_RUN_ID"], "1")
    own = {"SLURM_JOB_ID": "17", "CLUSTER_DDP_PRELOAD": "torchvision"}
    assert inherited_env.own({**own, **of_rank}) == own


PER_NODE = "NtasksPerN:B:S:C=0:0:*:* MinMemoryNode=1000M TresPerNode=gres/gpu:1"


@pytest.mark.parametrize(
    ("said", "env", "others"),
    [
        (PER_NODE, {"SLURM_MEM_PER_CPU": "500", "SLURM_MEM_PER_NODE": "1000"}, {"SLURM_MEM_PER_CPU"}),
        ("MinMemoryNode=0 MemPerTres=gres:gpu:100", {"SLURM_MEM_PER_GPU": "100"}, set()),
        (
            "MinMemoryNode=0\nMemPerTres=gres:gpu:100 MinMemoryNode=0",
            {"SLURM_MEM_PER_GPU": "100", "SLURM_MEM_PER_NODE": "9"},
            {"SLURM_MEM_PER_NODE"},
        ),
        (PER_NODE, {"SLURM_GPUS": "4", "SLURM_GPUS_PER_TASK": "1"}, {"SLURM_GPUS", "SLURM_GPUS_PER_TASK"}),
        (PER_NODE, {"SLURM_GPUS_PER_NODE": "1", "SLURM_NTASKS_PER_GPU": "1"}, {"SLURM_NTASKS_PER_GPU"}),
        (PER_NODE, {"SLURM_GPUS_PER_NODE": "2"}, {"SLURM_GPUS_PER_NODE"}),
        ("TresPerNode=gres:gpu:2", {"SLURM_GPUS_PER_NODE": "2"}, set()),
        ("TresPerNode=gres/gpu:2", {"SLURM_GPUS_PER_NODE": "1"}, {"SLURM_GPUS_PER_NODE"}),
        ("TresPerNode=gres:gpu", {"SLURM_GPUS_PER_NODE": "1"}, set()),
        ("TresPerNode=gres/gpu:a100", {"SLURM_GPUS_PER_NODE": "1"}, set()),
        ("TresPerNode=gres:gpu:a100:2,gres:x:1", {"SLURM_GPUS_PER_NODE": "a100:2"}, set()),
        ("TresPerTask=gres/gpu=1", {"SLURM_TRES_PER_TASK": "gres/gpu=1"}, set()),
        ("MinMemoryCPU=500M", {"SLURM_GPUS_PER_NODE": "2", "SLURM_MEM_PER_CPU": "500"}, {"SLURM_GPUS_PER_NODE"}),
        (None, {"SLURM_GPUS_PER_NODE": "2", "SLURM_MEM_PER_CPU": "500", "SLURM_MEM_PER_GPU": "1"}, set()),
    ],
)
def test_what_a_job_around_this_one_has_asked_for_is_not_its(
    tmp_path: Path, said: str | None, env: dict[str, str], others: set[str]
) -> None:
    """srun would say "mutually exclusive" of two kinds of memory, and "Invalid generic resource" of GPUs."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\n" + ("exit 1" if said is None else f"echo 'JobId=17 {said}'"))
    (tmp_path / "scontrol").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", **env}
    assert inherited_env.own(env) == {name: value for name, value in env.items() if name not in others}


OF_STEP = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}


@pytest.mark.parametrize(
    ("step_id", "said", "is_kept"),
    [
        ("0", "PID JOBID STEPID LOCALID GLOBALID\n71 17 batch 0 0\n72 17 batch - -", False),
        ("0", "PID JOBID STEPID LOCALID GLOBALID\n70 17 batch 0 0\n71 17 0 0 0", True),
        ("0", "", True),  # Slurm does not answer
        ("-5", "", False),  # a batch script of 26.05
        ("4294967290", "", False),  # the shell that salloc has started on the first node
    ],
)
def test_a_batch_script_takes_no_step_from_the_shell_that_submitted_it(
    tmp_path: Path, step_id: str, said: str, is_kept: bool
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_TASK_PID": "71"}
    env = {**own, **OF_STEP, "SLURM_STEP_ID": step_id, "SLURM_STEPID": step_id}
    assert inherited_env.own(env) == (env if is_kept else own)
