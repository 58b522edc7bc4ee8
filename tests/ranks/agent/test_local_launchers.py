"""What `tests/helpers/launcher_contract.py` asks of every launcher, on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_contract import CHECKS, parameters, programs
from launchers import ALL, Job, ancestry, play, send
from slowness import scaled

from cluster_ddp import processes
from cluster_ddp.cli import status, submit
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends.local import ThisMachine

MEMORY = Path("/sys/fs/cgroup/memory")
JOBS = {
    "local srun": (*ALL, "supervisor", *(["memory"] if os.access(MEMORY, os.W_OK) else [])),
    "local fork": ("stops", "raises"),
}
"""The launchers of `--local`: all jobs, and those in which the other one differs."""


def started(launcher: str, name: str, with_little_memory: tuple[str, ...]) -> Job:
    """Submit a job from the working folder."""
    own = f"{launcher.replace(' ', '-')}-{name}"
    words = ["--local", "--launcher", launcher.removeprefix("local "), "--gpus-per-node", "2", "--name", own]
    words += ["--no-check", "--", "python", "the ranks.py", name]
    if name == "memory":
        subprocess.run([*with_little_memory, sys.executable, "-m", "cluster_ddp.submit", *words], check=True)
    else:
        assert submit.main(words) == 0
    (run_dir,) = (path for path in Path("runs").resolve().glob(f"{own}-*") if path.is_symlink())
    pid = int(run_dir.name.rpartition("-")[2])
    job = Job(
        name=name,
        launcher=launcher,
        run_dir=run_dir,
        has_ended=lambda: status_of(job).ended,
        ancestry=lambda rank: ancestry(job.rank(rank)[0], pid),
        batch_process=lambda: [pid],
        cancel=lambda: ThisMachine().cancel(str(pid), None, run_dir),
    )
    return job


def status_of(job: Job) -> JobStatus:
    return ThisMachine().statuses(job.run_dir.name.rpartition("-")[2], None, job.run_dir)[0]


@contextlib.contextmanager
def little_memory() -> Iterator[tuple[str, ...]]:
    """Words before a command that give it, and all that it starts, 200 MB together."""
    if not os.access(MEMORY, os.W_OK):
        yield ()
        return
    group = MEMORY / f"test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        yield ("bash", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "bash")
    finally:
        deadline = time.monotonic() + scaled(20)
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Job]]:
    """All jobs, ended."""
    folder = tmp_path_factory.mktemp("it's launched")
    programs(folder)
    with pytest.MonkeyPatch.context() as patched, little_memory() as with_little:
        patched.chdir(folder)
        patched.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        names = [(launcher, name) for launcher, names in JOBS.items() for name in names]
        jobs = [started(*one, with_little) for one in names]
        try:
            play(jobs, 100)
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                assert status.main(["--json"]) == 0
            ends = {Path(one["run_dir"]).resolve(): one for one in json.loads(said.getvalue())}
            for job in jobs:
                job.end = ends[job.run_dir.resolve()] | {"exit_status": status_of(job).exit_code}
            yield {(job.launcher, job.name): job for job in jobs}
        finally:
            for job in jobs:  # what a killed job has left behind
                send(list(processes.environments({"CLUSTER_DDP_RUN_DIR": str(job.run_dir)})), "KILL")


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "check"), list(parameters(JOBS)))
def test_a_launcher_of_this_machine(jobs: dict[tuple[str, str], Job], launcher: str, check: str) -> None:
    asked = CHECKS[check]
    asked.holds(jobs[launcher, asked.job])
