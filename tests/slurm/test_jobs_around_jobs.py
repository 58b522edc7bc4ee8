"""Jobs that other jobs have submitted, and jobs of several groups: what is another's is not taken for their own."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.full, pytest.mark.every_slurm]

PYTHON = Path(sys.executable)
LAUNCH = shlex.quote(str(PYTHON.parent / "cluster-ddp"))
SHOW = f"""#!/bin/bash
exec {LAUNCH} launch -- bash -c 'echo "rank $RANK of $WORLD_SIZE: GPU $CUDA_VISIBLE_DEVICES"'
"""
TRAIN = """import cluster_ddp
with cluster_ddp.distributed() as world:
    world.print("ranks", world.world_size)
"""


@pytest.mark.parametrize(
    ("outer", "inner", "ranks"),
    [
        ("--gpus=4 --nodes=2", "--gres=gpu:1", ["rank 0 of 1: GPU 0"]),
        ("--gpus-per-node=2", "--gres=gpu:1 --mem=300M", ["rank 0 of 1: GPU 0"]),
        ("--gpus-per-node=1", "--gres=gpu:2 --ntasks-per-node=2", ["rank 0 of 2: GPU 0,1", "rank 1 of 2: GPU 0,1"]),
        (
            "--gpus-per-task=1 --ntasks=2 --mem-per-cpu=100M",
            "--gres=gpu:1 --nodes=2 --ntasks-per-node=1",
            ["rank 0 of 2: GPU 0", "rank 1 of 2: GPU 0"],
        ),
    ],
)
def test_a_batch_script_of_ones_own_has_its_own_gpus_and_memory(
    slurm: Cluster, tmp_path: Path, outer: str, inner: str, ranks: list[str]
) -> None:
    """It was submitted from within another job, whose requests are in its environment."""
    (tmp_path / "inner.sh").write_text(SHOW)
    submit = f"sbatch --wait --output=out {inner} inner.sh"
    done = slurm.run("sbatch", "--wait", "--output=outer", *outer.split(), "--wrap", submit, cwd=tmp_path)
    said = (tmp_path / "out").read_text()
    assert (done.returncode, sorted(said.splitlines())) == (0, ranks), said


def test_a_step_on_one_group_of_a_heterogeneous_job_says_so(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    directives = "#SBATCH --ntasks=1 --gres=gpu:1\n#SBATCH hetjob\n#SBATCH --ntasks=1 --gres=gpu:1\n"
    steps = "".join(
        f"echo step; srun {option} {shlex.quote(str(PYTHON))} train.py\n" for option in ("", "--het-group=0,1")
    )
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{directives}{steps}")
    done = slurm.run("sbatch", "--wait", "--output=out", "job.sh", cwd=tmp_path)
    _, one, both = (tmp_path / "out").read_text().split("step\n")
    assert done.returncode == 0, (one, both)
    assert "2 groups with 2 nodes, and this training runs on 1 of them. Hint: on all: srun --het-group=0-1" in one
    assert re.search(r"^ranks 1$", one, re.MULTILINE)
    assert "groups" not in both and re.search(r"^ranks 2$", both, re.MULTILINE)
