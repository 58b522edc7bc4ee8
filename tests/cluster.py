"""Handling jobs on a real Slurm in tests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.slurm import commands
from cluster_ddp.slurm.commands import JobStatus

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """A submitted job, or a whole array."""

    job_id: int
    env: Mapping[str, str]

    def wait(self, timeout_s: float = 120) -> list[JobStatus]:
        """Its status (an array's: one per task) once nothing more happens to it."""
        deadline = time.monotonic() + timeout_s
        while True:
            statuses = commands.job_statuses(self.job_id, env=self.env)
            if all(status.ended for status in statuses):
                return statuses
            if time.monotonic() > deadline:
                commands.run(["scancel", str(self.job_id)], env=self.env)
                raise AssertionError(f"no end within {timeout_s} s: {statuses}\n{self._outputs(statuses)}")
            time.sleep(0.3)

    def succeed(self, timeout_s: float = 120) -> str:
        """Wait; all must have completed. What they printed, an array's tasks one after the other."""
        statuses = self.wait(timeout_s)
        output = self._outputs(statuses)
        assert {status.state for status in statuses} == {"COMPLETED"}, f"{statuses}\n{output}"
        return output

    def fail(self, timeout_s: float = 120) -> tuple[JobStatus, str]:
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

    name: str
    env: Mapping[str, str]

    def run(self, *argv: str, cwd: Path = ROOT, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node."""
        return subprocess.run(argv, env=dict(self.env), cwd=cwd, capture_output=True, text=True, timeout=timeout_s)

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
