"""What a job's log says of tasks that are not as many as GPUs."""

from __future__ import annotations

import pytest

from cluster_ddp.agent import launch_env
from cluster_ddp.agent.job import launch_job
from cluster_ddp.agent.launch_options import AgentOptions
from cluster_ddp.errors import SpecError

ONE_TASK = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}
FOUR_GPUS = {**ONE_TASK, "SLURM_GPUS_ON_NODE": "4"}


def said(env: dict[str, str], **options: object) -> str:
    asked = AgentOptions(command=("true",), **options)  # type: ignore[arg-type]
    return launch_job.gpu_remark(launch_env.shape(asked, env), asked)


@pytest.mark.parametrize(
    ("env", "options", "words"),
    [
        (ONE_TASK, {}, ""),
        (ONE_TASK, {"ranks_per_node": 8}, ""),
        (FOUR_GPUS, {}, "The job has 1 task and 4 GPUs on each node: starting 4 ranks there."),
        ({**FOUR_GPUS, "SLURM_NTASKS_PER_NODE": "4"}, {}, ""),
        ({**FOUR_GPUS, "SLURM_NTASKS_PER_NODE": "2"}, {"gpus_per_task": 2}, ""),
        ({**FOUR_GPUS, "SLURM_NTASKS_PER_NODE": "2"}, {}, "the job has 4 GPUs there; the others stay idle."),
        (FOUR_GPUS, {"ranks_per_node": 5}, "the job has 4 GPUs there; some have no GPU of their own."),
        (FOUR_GPUS, {"ranks_per_node": 5}, "Hint: --ntasks-per-node=4, or cluster-ddp launch --ranks-per-node 4"),
    ],
)
def test_it_is_said_if_they_differ(env: dict[str, str], options: dict[str, object], words: str) -> None:
    assert (words in said(env, **options)) if words else said(env, **options) == ""


def test_more_ranks_than_cpus_are_refused_where_srun_would() -> None:
    with pytest.raises(SpecError, match="the job has 8 CPUs there"):
        said(FOUR_GPUS, ranks_per_node=9)
    assert "GPUs" in said(FOUR_GPUS, ranks_per_node=9, launcher="fork")
    for overcommit in ("--overcommit", "-sO"):
        assert "GPUs" in said(FOUR_GPUS, ranks_per_node=9, srun_options=(overcommit,))
    assert "GPUs" in said({**FOUR_GPUS, "SLURM_OVERCOMMIT": "1"}, ranks_per_node=9)
