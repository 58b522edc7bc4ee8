"""Ends of jobs for which Slurm has a number only: their words, on a real Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Job, Place

from cluster_ddp.slurm import commands, job_status, reasons


def run(slurm: Cluster, verb: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return slurm.run(sys.executable, "-m", "cluster_ddp", verb, *words, cwd=cwd)


@pytest.mark.fault(
    "a node can't open the job's output file or folder (Slurm's 0:53)",
    "FAILED; `--watch`, `status`, `report` and the doctor say why and how to fix it",
)
@pytest.mark.every_slurm
def test_a_node_that_can_not_write_the_output_is_said_to(slurm: Cluster, tmp_path: Path) -> None:
    """By squeue and by scontrol; `status`, `logs -f` and the autopsy say it. The run directory is gone on the node."""
    place = Place(slurm, tmp_path)
    words = reasons.of_end("FAILED", "None", 53)
    run_dir = place.start("--begin", "now+1hour", "--name", "fit", "--", "true")
    job, folder = run_dir.name.removeprefix("fit-"), run_dir.resolve()
    shutil.move(folder, tmp_path / "kept")
    folder.touch()  # newer Slurms make a folder that is missing
    commands.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm.env)
    (ended,) = Job(int(job), slurm.env).wait()
    assert (ended.state, ended.signal) == ("FAILED", 53)
    folder.unlink()
    shutil.move(tmp_path / "kept", folder)
    (listed,) = job_status.all_jobs(env=slurm.env)[job]
    assert (listed.state, listed.signal) == ("FAILED", 53)
    assert f"Job {job}: {words}.\n" in run(slurm, "status", job, cwd=tmp_path).stdout
    assert words in run(slurm, "logs", "-f", job, cwd=tmp_path).stdout
    assert words in run(slurm, "doctor", "--autopsy", str(run_dir), cwd=tmp_path).stderr
    assert words in run(slurm, "report", job, cwd=tmp_path).stdout


@pytest.mark.every_slurm
def test_a_killed_script_is_no_failed_launch(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm 22.05 gives both the reason JobLaunchFailure."""
    sbatch = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out"]
    job = commands.run(sbatch, env=slurm.env, text="#!/bin/bash\nkill -9 $$\n").strip()
    (ended,) = Job(int(job), slurm.env).wait()
    (listed,) = job_status.all_jobs(env=slurm.env)[job]
    assert (ended.state, ended.signal) == (listed.state, listed.signal) == ("FAILED", 9)
    assert reasons.of_end(listed.state, listed.reason, listed.signal) == ""
