"""The errors that a user meets, each caused for real: one job, a section for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster

# Section -> what runs in the batch shell of a job with 2 nodes x 2 tasks x 2 GPUs.
SECTIONS = {
    "without srun": "python -m cluster_ddp env",
    "RANK from the batch shell": "(export RANK=$SLURM_PROCID; srun python -m cluster_ddp env)",
    "partial": "srun env -u SLURM_PROCID -u SLURM_JOB_ID -u SLURM_JOBID RANK=1 python -m cluster_ddp env",
    "outside the world": "srun env SLURM_PROCID=4 python -m cluster_ddp env",
    "unreadable nodelist": "srun env 'SLURM_STEP_NODELIST=node[1-' python -m cluster_ddp env",
    "no address": "srun env -u SLURM_STEP_NODELIST -u SLURM_JOB_NODELIST -u SLURM_NODELIST python -m cluster_ddp env",
    # (--mem=0: the step before may have its memory still)
    "more tasks than GPUs": "srun --overlap --mem=0 --ntasks=4 --nodes=1 --gres=gpu:2 python -m cluster_ddp env",
    "fewer tasks than GPUs": "srun --ntasks=2 --ntasks-per-node=1 --gres=gpu:2 python -m cluster_ddp env",
    "the job's address in a step elsewhere": (
        "MASTER_ADDR=$SLURMD_NODENAME srun --nodes=1 --ntasks=2 --relative=1 python -m cluster_ddp env"
    ),
    "GPUs that torch does not see": (
        "srun --nodes=1 --ntasks=2 env -u CLUSTER_DDP_DUMMY_GPUS python -m cluster_ddp.train --dataset digits --dry-run"
    ),
    "no error": "srun env -u SLURM_LOCALID -u SLURM_NODEID python -m cluster_ddp env",
}
EXPECTED = {
    "without srun": ["SLURM_NTASKS=4", "the job has 4 tasks", "Hint: start it with srun"],
    "RANK from the batch shell": ["RANK=0, SLURM_PROCID=3, which contradict each other", "remove 'export RANK=…'"],
    "partial": ["RANK=1, WORLD_SIZE unset, LOCAL_RANK unset: all three are needed", "Hint: set all three"],
    "outside the world": ["rank=4 does not fit world_size=4"],
    "unreadable nodelist": ["Reading SLURM_STEP_NODELIST", "unexpected '['", "scontrol show hostnames"],
    "no address": ["MASTER_ADDR unset, SLURM_STEP_NODELIST unset", "Hint: export MASTER_ADDR"],
    "more tasks than GPUs": ["SLURM_GPUS_ON_NODE=2", "more tasks than GPUs", "--ntasks-per-node=2 --gres=gpu:2"],
    "fewer tasks than GPUs": ["SLURM_GPUS_ON_NODE=2", "fewer tasks than GPUs", "--ntasks-per-node=2 --gres=gpu:2"],
    "GPUs that torch does not see": ["Slurm gave 2 GPUs on this node", "torch 2.", "sees none (CUDA_", "--no-cuda"],
    "the job's address in a step elsewhere": ["MASTER_ADDR=node", "rank 0 of this step runs on node"],
}


@pytest.fixture(scope="module")
def sections(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    lines = [f'echo "== {name}"\n{command} || echo "status $?"' for name, command in SECTIONS.items()]
    # More CPUs than tasks, so that a step may ask for more tasks than there are GPUs.
    head = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=2\n"
    # srun would take the job's CPUs per task for each of the four tasks; from 23.11 on it has them from both.
    head += "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK\n"
    script = head + "\n".join(lines) + "\n"
    output = slurm.submit(script, tmp_path_factory.mktemp("errors")).succeed()
    parts = re.split(r"^== (.*)$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_error_is_shown(sections: dict[str, str], name: str) -> None:
    for text in EXPECTED[name]:
        assert text in sections[name]
    assert "status 2" in sections[name]
    assert "Traceback" not in sections[name]


def test_a_container_that_strips_the_local_id_is_understood(sections: dict[str, str]) -> None:
    section = sections["no error"]
    assert sorted(re.findall(r"^local_rank +(\d)", section, re.MULTILINE)) == ["0", "0", "1", "1"]
    assert sorted(re.findall(r"^rank +(\d)", section, re.MULTILINE)) == ["0", "1", "2", "3"]


def test_sallocs_shell_is_told_to_use_srun(slurm: Cluster) -> None:
    done = slurm.run("salloc", "--nodes=2", "--ntasks-per-node=2", "python", "-m", "cluster_ddp", "env")
    assert done.returncode == 2
    assert "Hint: start it with srun" in done.stderr


def test_training_without_srun_ends_at_once(slurm: Cluster, tmp_path: Path) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\npython -m cluster_ddp.train --dataset digits\n"
    status, output = slurm.submit(script, tmp_path).fail()
    assert status.exit_code == 2
    assert "Hint: start it with srun" in output


@pytest.mark.full
def test_missing_data_is_told_once_and_ends_the_job(slurm: Cluster, tmp_path: Path) -> None:
    """Each rank misses it; the first to say so is the one that is heard."""
    arguments = ("--data-dir", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run"))
    _, output = slurm.submit(Path("jobs/mnist_1node.sbatch"), tmp_path, *arguments).fail()
    assert output.count("Hint: on a login node: python scripts/download_data.py") == 1
    assert "Traceback" not in output
