"""A job that is suspended with all its processes, and continued: nothing has failed, and nobody hangs."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled, wait_until
from tasks import PLACE

from cluster_ddp import processes
from cluster_ddp.run import journal

ENV = {name: value for name, value in PLACE.items() if not name.startswith("SLURM")}
TRAINING = """import os, pathlib, time, torch, torch.distributed as dist, cluster_ddp
from cluster_ddp.runtime.failure import last_progress
with cluster_ddp.distributed(cuda=False, hang_warning_s=15.0) as world:
    steps, go = 0, torch.zeros(1)
    while not go:
        steps += 1
        pathlib.Path(f"steps-{world.rank}").write_text(str(steps))
        go += os.path.exists("go")
        dist.all_reduce(go)
        last_progress.note_step()
        time.sleep(0.05)
"""


def tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += processes.children(one)
    return found


def suspend(pid: int, seconds: float) -> None:
    """As scontrol suspend and resume: all processes stop, also those that just start, and are continued."""

    def are_stopped() -> bool:
        found = tree(pid)
        for one in found:
            os.kill(one, signal.SIGSTOP)
        return all(map(processes.is_stopped, found))

    wait_until(are_stopped)
    time.sleep(seconds)
    for one in tree(pid):
        os.kill(one, signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["srun", "fork"])
def test_a_suspended_job_trains_on(tmp_path: Path, launcher: str) -> None:
    """It is suspended for longer than a hang may last, --hang-restart-s included; no busy machine takes so long."""
    (tmp_path / "train.py").write_text(TRAINING)

    def steps() -> int:
        return min((int(path.read_text() or 0) for path in tmp_path.glob("steps-*")), default=0)

    options = ["--ranks=2", f"--run-dir={tmp_path}/run", "--restarts=1", f"--launcher={launcher}"]
    words = [sys.executable, "-m", "cluster_ddp.agent", "job", *options, "--", sys.executable, "train.py"]
    env = {**ENV, "CLUSTER_DDP_HANG_RESTART_S": "5", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "job.log").open("w") as log:
        job = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: steps() > 5)
        for _ in range(2):
            suspend(job.pid, 30.0)
            enough = steps() + 6
            wait_until(functools.partial(lambda enough: steps() >= enough, enough))
        (tmp_path / "go").touch()
        assert job.wait(timeout=scaled(LIMIT_S)) == 0
    finally:
        for pid in tree(job.pid) if job.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        job.wait()
    said = "".join(path.read_text() for path in (*(tmp_path / "run").glob("*.log"), tmp_path / "job.log"))
    ended = journal.last_end(tmp_path / "run")
    assert ended is not None and (ended.state, ended.start) == ("COMPLETED", 0), said
    assert "No step was completed" not in said and "Starting again" not in said, said
