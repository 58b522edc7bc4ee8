"""`--cleanup`, and a site template's lines after the ranks: they run before Slurm is asked for a requeue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

# As Slurm: it ends the batch script soon after it has accepted a requeue; srun would be refused from then on.
SCONTROL = '#!/bin/bash\n[[ $1 != requeue ]] || { echo "$*" >>"$TOLD"; kill -s TERM "$PPID"; }\n'
CLEANUP = 'false\necho "$MINE of job $SLURM_JOB_ID, status $status" >>"$TOLD"; false'


@pytest.mark.parametrize(
    ("status", "told", "returned"),
    [
        (75, ["it's mine of job 7, status 75", "requeue 7"], -signal.SIGTERM),
        (3, ["it's mine of job 7, status 3"], 3),
        (0, ["it's mine of job 7, status 0"], 0),
    ],
)
def test_it_runs_once_the_ranks_have_ended_and_before_a_requeue(
    tmp_path: Path, status: int, told: list[str], returned: int
) -> None:
    for program, text in {"srun": f"#!/bin/sh\nexit {status}\n", "scontrol": SCONTROL, "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURMD_NODENAME": "localhost",
    }
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(tmp_path / "told"), "MINE": "it's mine"}
    done = subprocess.run(
        [sys.executable, "-m", "cluster_ddp.agent", "job", f"--cleanup={CLEANUP}", "--", "true"],
        env={**os.environ, **job, **more},
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert (tmp_path / "told").read_text().splitlines() == told, done.stderr
    assert done.returncode == returned, done.stderr


def test_it_runs_on_this_machine_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster_ddp.agent", "job", "--ranks=1", '--cleanup=echo "was $status"', "--"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run([*command, "sh", "-c", "exit 3"], env=env, capture_output=True, text=True, timeout=scaled(60))
    assert (done.stdout, done.returncode) == ("was 3\n", 3), done.stderr
