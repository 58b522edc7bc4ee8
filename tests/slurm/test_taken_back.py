"""A submission that is broken off leaves nothing in a real Slurm, and nothing on disk."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SUBMIT, Cluster, Place
from slowness import LIMIT_S, scaled, wait_until

import cluster_ddp
from cluster_ddp.errors import SlurmError
from cluster_ddp.run import journal
from cluster_ddp.slurm import commands, job_status


@pytest.mark.fault(
    "Ctrl-C, HUP or TERM while `submit` submits an array",
    "`submit` cancels the job and removes its files",
    bound="seconds",
    also=("test_a_signal_while_sbatch_answers_and_the_job_runs",),
)
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGTERM"])
def test_a_signal_while_an_array_is_submitted(slurm: Cluster, tmp_path: Path, name: str) -> None:
    array = ("--no-check", "--name", f"broken{name}", "--array", "0-999", "--", "true")
    process = subprocess.Popen([*SUBMIT, *array], cwd=tmp_path, env=dict(slurm.env))
    # Five of its thousand folders are there.
    wait_until(lambda: process.poll() is not None or list(tmp_path.glob("runs/*/5")), pause_s=0.001)
    assert process.poll() is None
    process.send_signal(signal.Signals[name])
    assert process.wait(timeout=scaled(LIMIT_S)) != 0
    assert commands.run(["squeue", "--noheader", f"--name=broken{name}"], env=slurm.env) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.every_slurm
def test_a_signal_while_sbatch_answers_and_the_job_runs(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has started before its id is known here: it is ended first, then its files are removed."""
    real = shutil.which("sbatch", path=slurm.env["PATH"])
    (tmp_path / "bin").mkdir()
    wait = f'until [[ -e {tmp_path}/starts ]]; do sleep 0.1; done; kill -TERM "$PPID"'
    (tmp_path / "bin" / "sbatch").write_text(f'#!/bin/bash\n"{real}" "$@" >{tmp_path}/id\n{wait}\ncat {tmp_path}/id\n')
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    (tmp_path / "here").mkdir()
    command = ("bash", "-c", f"touch {tmp_path}/starts; exec sleep 600")
    env = {**slurm.env, "PATH": f"{tmp_path}/bin:{slurm.env['PATH']}"}
    done = subprocess.run(
        [*SUBMIT, "--no-check", "--", *command], cwd=tmp_path / "here", env=env, timeout=scaled(LIMIT_S)
    )
    assert done.returncode == -signal.SIGTERM
    (status,) = job_status.job_statuses((tmp_path / "id").read_text().strip(), env=slurm.env)
    assert status.state == "CANCELLED"
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.every_slurm
@pytest.mark.parametrize("array", [(), ("--array", "4-5")])
def test_a_submission_that_is_killed_once_sbatch_has_answered(
    slurm: Cluster, tmp_path: Path, array: tuple[str, ...]
) -> None:
    """The job runs, and completes what the submission has left to do."""
    real = shutil.which("sbatch", path=slurm.env["PATH"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(f'#!/bin/bash\n"{real}" "$@" >{tmp_path}/id\nkill -KILL "$PPID"\n')
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    env = {**slurm.env, "PATH": f"{tmp_path}/bin:{slurm.env['PATH']}"}
    words = [*SUBMIT, "--no-check", "--name", "fit", *array, "--", "echo", "hello"]
    assert subprocess.run(words, cwd=tmp_path, env=env, timeout=scaled(LIMIT_S)).returncode == -signal.SIGKILL
    job = (tmp_path / "id").read_text().strip()
    labels = [f"{job}_{task}" for task in (4, 5)] if array else [job]
    for folder in (f"fit-{label.replace('_', '/')}" for label in labels):
        wait_until(lambda folder=folder: journal.last_end(tmp_path / "runs" / folder))
    assert len([path for path in (tmp_path / "runs").iterdir() if path.is_symlink()]) == 1
    for asked in (job, f"runs/fit-{job}"):
        shown = slurm.run(sys.executable, "-m", "cluster_ddp", "status", "--json", asked, cwd=tmp_path)
        assert [(one["job"], one["name"]) for one in json.loads(shown.stdout)] == [(label, "fit") for label in labels]
    again = slurm.run(*SUBMIT, "--no-check", "--watch", "--resume", labels[0], cwd=tmp_path)
    assert (again.returncode, "hello" in again.stdout) == (0, True), again.stdout + again.stderr


@pytest.mark.fault(
    "sbatch submits but gives no answer", "`submit` finds the job by its comment and cancels it", bound="60 s"
)
def test_an_sbatch_that_answers_too_late(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("sbatch", path=slurm.env["PATH"])
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\n"{real}" "$@" >{tmp_path}/id\nexec sleep 1000\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    monkeypatch.setenv("PATH", f"{tmp_path}:{slurm.env['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "TIMEOUT_S", 20.0)
    with pytest.raises(SlurmError, match=r"It had submitted the job, which is now cancelled\."):
        cluster_ddp.submit_array(cluster_ddp.JobSpec(name="late", array="0-2"), ["sleep", "600"], check=False)
    statuses = job_status.job_statuses((tmp_path / "id").read_text().strip(), env=slurm.env)
    assert {status.state for status in statuses} == {"CANCELLED"}
    assert not (tmp_path / "runs").exists()


def test_a_secret_can_come_from_a_file(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "secrets").write_bytes(b"MY_TOKEN=it's a secret\0")
    place = Place(slurm, tmp_path)
    options = (f"--sbatch-options=--export-file={tmp_path}/secrets", "--no-check", "--watch")
    done = place.submit(*options, "--", "bash", "-c", 'echo "got $MY_TOKEN"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "got it's a secret" in done.stdout
    kept = [path for path in tmp_path.rglob("*") if path.name in ("spec.json", "job.sbatch")]
    assert len(kept) == 2
    assert not any("it's a secret" in path.read_text() for path in kept)


@pytest.mark.full
@pytest.mark.parametrize(("options", "modes"), [((), (0o700, 0o600)), (("--share",), (0o750, 0o640))])
def test_who_may_read_a_run(slurm: Cluster, tmp_path: Path, options: tuple[str, ...], modes: tuple[int, int]) -> None:
    train = ("python", "-m", "cluster_ddp.train", "--dataset", "digits", "--dry-run", "--no-cuda")
    done = Place(slurm, tmp_path).submit("--no-check", *options, "--nodes", "2", "--watch", "--", *train)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = (tmp_path / "runs" / "latest").resolve()
    assert run_dir.stat().st_mode & 0o777 == modes[0]
    assert {(run_dir / name).stat().st_mode & 0o777 for name in ("spec.json", "job.sbatch", "run.json")} == {modes[1]}
