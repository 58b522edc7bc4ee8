"""A job's agent on its batch host, with programs that stand in for Slurm's."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

ROOT = Path(__file__).parents[4]
FILES = 256
# While squeue answers, the agent has started no ranks yet: so early may sbatch --signal=B:USR1@… or scancel --batch be.
SQUEUE = '#!/bin/bash\nkill -s "$SIGNAL" "$PPID"\nsleep 0.3\necho "1896087600 1896091200"\n'
SRUN = "#!/bin/bash\ntrap 'echo saved; exit 75' USR1 HUP\necho ranks\nfor i in {1..300}; do sleep 0.1; done\n"


def start(folder: Path, name: str = "CONT", *, srun: str = SRUN) -> subprocess.CompletedProcess[str]:
    """Run a job's agent, which gets a signal while it asks Slurm for the job's times."""
    for program, text in {"squeue": SQUEUE, "srun": srun, "scontrol": "#!/bin/sh\nexit 1\n"}.items():
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURMD_NODENAME": "n1"}
    env = {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}", "SIGNAL": name, "TMPDIR": str(folder)}
    agent = [sys.executable, "-m", "cluster_ddp.agent", "job", "--max-requeues", "0", "--", "true"]
    command = ["bash", "-c", f"ulimit -Sn {FILES}; exec {shlex.join(agent)}"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(60))


@pytest.mark.parametrize("name", ["USR1", "HUP"])
def test_one_that_comes_before_the_ranks_is_passed_on_to_them(tmp_path: Path, name: str) -> None:
    """It would end the agent, and with it the job."""
    done = start(tmp_path, name)
    assert (done.stdout.splitlines()[:2], done.returncode) == (["ranks", "saved"], 75), done


def test_term_is_final(tmp_path: Path) -> None:
    done = start(tmp_path, "TERM")
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM), done


def test_it_may_hear_more_tasks_than_a_process_usually_has_open_files(tmp_path: Path) -> None:
    """1024, say. The ranks keep that limit."""
    ask = '#!/bin/bash\nulimit -Sn\nsleep 0.3\nawk "/open files/ {print \\$4}" /proc/$PPID/limits; ulimit -Hn\n'
    ranks, agent, most = start(tmp_path, srun=ask).stdout.split()
    assert (ranks, agent) == (str(FILES), most)
