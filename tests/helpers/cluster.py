"""Handling jobs on a real Slurm in tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from slowness import scaled

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run import places, spec_file
from cluster_ddp.sandbox.layout import Layout
from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.render import agent_options, render
from cluster_ddp.submission.spec import JobSpec

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
from render_jobs import JOBS  # noqa: E402

TIMEOUT_S = 600.0
"""For what hangs only: a job may wait for others' nodes. (A full run of all tests on Slurm takes about ten minutes.)"""
POLL_S = 0.8
"""Between two looks at a job. With 0.3 s, all tests together called scontrol 5,600 times."""
SUBMIT = (sys.executable, "-m", "cluster_ddp.submit")


def sandbox_name(purpose: str) -> str:
    """A name that no other process's sandbox has; tests/conftest.py finds it."""
    process = (os.environ["PYTEST_RUN"], os.environ.get("PYTEST_XDIST_WORKER"))
    return "-".join([purpose, *filter(None, process)])


SKIPPED = "SLURM TESTS SKIPPED"


def skip(reason: str) -> NoReturn:
    """Skip for want of what CI must have: there, that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI this may not skip: {reason}")
    pytest.skip(reason)


def skip_without_slurm(error: ClusterDDPError) -> NoReturn:
    """Skip, as Slurm can't run here. All such tests are one line at the end (conftest.py)."""
    skip(f"{SKIPPED}: {error.asked} {' '.join(error.found.split())} Hint: {error.hint}")


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter in the tests of this module that this session runs, such as with -k."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    return [item.callspec.params[name] for item in items if name in item.callspec.params]


@dataclass(frozen=True)
class Job:
    """A submitted job, or a whole array."""

    job_id: int
    env: Mapping[str, str] = field(repr=False)

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[JobStatus]:
        """Its status (an array's: one per task) once nothing more happens to it."""
        deadline = time.monotonic() + scaled(timeout_s)
        while True:
            statuses = job_status.job_statuses(self.job_id, env=self.env)
            if all(status.ended for status in statuses):
                return statuses
            if time.monotonic() > deadline:
                commands.run(["scancel", str(self.job_id)], env=self.env)
                raise AssertionError(f"no end within {timeout_s} s: {statuses}\n{self._outputs(statuses)}")
            time.sleep(POLL_S)

    def succeed(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait; all must have completed. What they printed, an array's tasks one after the other."""
        statuses = self.wait(timeout_s)
        output = self._outputs(statuses)
        assert {status.state for status in statuses} == {"COMPLETED"}, f"{statuses}\n{output}"
        return output

    def fail(self, timeout_s: float = TIMEOUT_S) -> tuple[JobStatus, str]:
        """Wait; it must have failed. Its status and what it printed."""
        (status,) = self.wait(timeout_s)
        output = self._outputs([status])
        assert status.state == "FAILED", f"{status}\n{output}"
        return status, output

    def _outputs(self, statuses: list[JobStatus]) -> str:
        paths = [Path(status.stdout) for status in statuses]
        return "".join(path.read_text() if path.exists() else f"({path} is missing)" for path in paths)


@dataclass(frozen=True)
class Cluster:
    """The sandbox of this test session."""

    layout: Layout
    env: Mapping[str, str] = field(repr=False)
    launcher: str = "srun"
    """What the jobs of test_jobs.py and faults/ are started with (pytest --launcher)."""

    @property
    def name(self) -> str:
        return self.layout.name

    def run(self, *argv: str, cwd: Path = ROOT, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        return subprocess.run(
            argv, env=dict(self.env), cwd=cwd, capture_output=True, text=True, timeout=scaled(timeout_s)
        )

    def wrapped(self, lines: str, *command: str) -> tuple[str, ...]:
        """A Python script of which each rank runs after some lines of bash."""
        if self.launcher == "fork":  # which runs no shells
            return (command[0], str(ROOT / "tests" / "slurm" / "after.py"), lines, *command[1:])
        return ("unshare", "--mount", "bash", "-c", f'{lines}\nexec "$@"', "bash", *command)

    def script(self, spec: JobSpec) -> str:
        """The batch script of a job, with this session's launcher."""
        spec = replace(spec, launcher=self.launcher)  # type: ignore[arg-type]  # pytest has checked it
        return render(spec, agent_options(spec), source="")

    def job(self, name: str) -> str | Path:
        """jobs/NAME.sbatch; with another launcher than srun, what it would be with that."""
        path = ROOT / "jobs" / f"{name}.sbatch"
        return path if self.launcher == "srun" else self.script(next(spec for spec in JOBS if spec.name == name))

    def submit(self, script: str | Path, folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Job:
        """Submit a script (its text, or a file of the checkout) from the checkout; its output goes into `folder`."""
        if isinstance(script, str):
            path = folder / "job.sbatch"
            path.write_text(script)
            script = path
        where = (f"--chdir={ROOT}", f"--output={folder}/%x-%j.out")
        submitted = commands.submit(script, options=(*where, *options), arguments=arguments, env=self.env)
        return Job(submitted.job_id, self.env)


def records(run_dir: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def label_of(run_dir: Path) -> str:
    """The job of a run directory, by its link: 12, or 12_3 for an array's task."""
    name = run_dir.name
    return f"{run_dir.parent.name.rpartition('-')[2]}_{name}" if name.isdecimal() else name.rpartition("-")[2]


@dataclass(frozen=True)
class Place:
    """A folder to submit from."""

    slurm: Cluster
    folder: Path

    def submit(
        self, *arguments: str, env: dict[str, str] | None = None, program: tuple[str, ...] = SUBMIT
    ) -> subprocess.CompletedProcess[str]:
        launcher = () if "--launcher" in arguments else ("--launcher", self.slurm.launcher)
        return subprocess.run(
            [*program, *launcher, *arguments],
            cwd=self.folder,
            env={**self.slurm.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=scaled(TIMEOUT_S),
        )

    def start(self, *arguments: str, program: tuple[str, ...] = SUBMIT) -> Path:
        """Submit; the run directory (of an array, its first task's)."""
        done = self.submit("--no-check", *arguments, program=program)
        assert done.returncode == 0, done.stderr
        return self.named_by(done.stdout)

    def named_by(self, said: str) -> Path:
        """The run directory that a submission has announced, by the link with the job's id if there is one."""
        run_dir = self.folder / re.search(r"Run director(?:y|ies): (\S+)", said)[1]
        whole = places.named_by_us(run_dir)
        links = (path for path in whole.parent.glob("*-*") if path.is_symlink() and path.readlink().name == whole.name)
        return next(links, whole) / run_dir.relative_to(whole)

    def end_of(self, run_dir: Path, timeout_s: float = TIMEOUT_S) -> job_status.JobStatus:
        label = spec_file.read(run_dir)["job"]
        deadline = time.monotonic() + scaled(timeout_s)
        while True:
            (status,) = job_status.job_statuses(label, env=self.slurm.env)
            if status.ended:
                return status
            assert time.monotonic() < deadline, f"{status}\n{output(run_dir)}"
            time.sleep(POLL_S)

    def completed(self, run_dir: Path) -> str:
        """Wait; it must have completed. What it printed."""
        status = self.end_of(run_dir)
        assert status.state == "COMPLETED", f"{status}\n{output(run_dir)}"
        return output(run_dir)

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Where two environments differ: all that a test may print of them."""
    names = sorted({**ours, **theirs})
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def output(run_dir: Path) -> str:
    return "".join(f"==> {path.name} <==\n{path.read_text()}" for path in sorted(run_dir.glob("*.log")))
