"""`cluster-ddp launch` in scripts and shells that are not ours: a university's batch script, and salloc."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster

# One line differs from a help page's: srun python train.py --seed $SLURM_ARRAY_TASK_ID
SCRIPT = """#!/bin/bash
#SBATCH --job-name=my_train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --time=00:10:00
#SBATCH --array=0-1
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.edu
#SBATCH --output=slurm-%A_%a.out

cluster-ddp launch -- python "my train.py" --seed $SLURM_ARRAY_TASK_ID
"""
TRAIN = """import os, sys
if sys.argv[2] == "1" and os.environ["RANK"] == "3":
    raise ValueError("no such labels")
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "local", os.environ["LOCAL_RANK"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "it's my folder"
    folder.mkdir()
    (folder / "my train.py").write_text(TRAIN)
    return folder


def test_a_universitys_script_with_one_line_changed(slurm: Cluster, folder: Path) -> None:
    (folder / "job.sh").write_text(SCRIPT)
    done = slurm.run("sbatch", "--wait", "--parsable", "job.sh", cwd=folder)
    job = done.stdout.split()[0]
    well, ill = ((folder / f"slurm-{job}_{task}.out").read_text() for task in (0, 1))
    ranks = [f"rank {rank} of 4 local {rank % 2}" for rank in range(4)]
    assert sorted(well.splitlines()) == ranks
    *_, last = ill.splitlines()
    assert last.startswith("Failed first, with status 1: rank 3 on node")
    assert last.endswith(": ValueError: no such labels")


@pytest.mark.full
def test_a_shell_of_salloc_on_the_login_node(slurm: Cluster, folder: Path) -> None:
    """It knows no node by name and no GPUs; the ranks meet on the first node, and their ends are heard."""
    shutil.copy(ROOT / "tests" / "helpers" / "torchrun_script.py", folder)
    salloc = ("salloc", "--quiet", "--nodes=2", "--cpus-per-task=2", "--gres=gpu:2", "--ntasks-per-node=1")
    done = slurm.run(*salloc, "cluster-ddp", "launch", "--", "python", "torchrun_script.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"rank {rank} of 4: loss") for rank in range(4)] == [1, 1, 1, 1]
    assert "The job has 1 task and 2 GPUs on each node: starting 2 ranks there.\n" in done.stderr
    fails = ("cluster-ddp", "launch", "--", "python", "my train.py", "--seed", "1")
    done = slurm.run(*salloc, *fails, cwd=folder)
    assert "Failed first, with status 1: rank 3 on node" in done.stderr, done.stderr


GPUS_PER_TASK = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-task=2
#SBATCH --output=gpus.out

exec cluster-ddp launch -- sh -c 'echo "$RANK of $WORLD_SIZE: $CUDA_VISIBLE_DEVICES"'
"""


@pytest.mark.every_slurm
def test_gpus_of_a_task_become_the_ranks_also_in_a_job_from_a_shell_of_srun(slurm: Cluster, folder: Path) -> None:
    """Its step's variables are inherited."""
    (folder / "gpus.sh").write_text(GPUS_PER_TASK)
    slurm.run("srun", "--ntasks=1", "sbatch", "--wait", "gpus.sh", cwd=folder)
    said = sorted((folder / "gpus.out").read_text().splitlines())
    assert said[:-1] == [f"{rank} of 4: 0,1" for rank in range(4)]


@pytest.mark.full
def test_the_shortest_job(slurm: Cluster, tmp_path: Path) -> None:
    """Not in the checkout: a run directory there, of a job with the same number, would be resumed."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    in_folder = (f"--chdir={tmp_path}",)
    said = slurm.submit(ROOT / "jobs" / "minimal.sbatch", tmp_path, options=in_folder).succeed()
    assert re.findall(r"Train Epoch: (\d) \[0/", said) == ["1", "2", "3"]
    assert said.count("Test set: ") == 3
