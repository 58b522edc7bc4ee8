"""What Slurm says of jobs, whatever words their users have put into them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Place, label_of

from cluster_ddp.slurm import commands, job_status

STATUS = (sys.executable, "-m", "cluster_ddp", "status")
WORDS = "one JobState=FAILED\nJobId={job} JobState=FAILED Reason=x StdOut=/evil\nJobId=two  ExitCode=9:0"


def test_a_users_words_are_not_slurms(slurm: Cluster, tmp_path: Path) -> None:
    """Its name, comment and command (which SubmitLine shows from 25.11 on)."""
    sbatch = ["sbatch", "--parsable", f"--output={tmp_path}/a  b.out", f"--job-name=n {WORDS}"]
    job = commands.run([*sbatch, f"--wrap=sleep 300 # {WORDS}"], env=slurm.env, text="").strip()
    try:
        commands.run(["scontrol", "update", f"JobId={job}", f"Comment={WORDS.format(job=job)}"], env=slurm.env)
        (status,) = job_status.job_statuses(job, env=slurm.env)
        assert status.job_id == int(job)
        assert status.state in ("PENDING", "RUNNING")
        assert (status.exit_code, status.stdout) == (0, f"{tmp_path}/a  b.out")
        done = slurm.run(*STATUS, job, cwd=tmp_path)
        shown, _, state = done.stdout.splitlines()[1].split()[:3]
        assert (shown, state in ("PENDING", "RUNNING")) == (job, True), done.stderr
    finally:
        commands.run(["scancel", job], env=slurm.env)


def test_many_run_directories_are_two_questions(slurm: Cluster, tmp_path: Path) -> None:
    """A job that ended, an array that waits, and one that Slurm doesn't know; whatever squeue shows by default."""
    place = Place(slurm, tmp_path)
    ended = place.start("--name", "ended", "--", "false")
    place.end_of(ended)
    waiting = place.start("--name", "waits", "--begin", "now+1hour", "--array", "0-1%1", "--", "true")
    spec = json.loads((ended / "spec.json").read_text()) | json.loads((ended / "job.json").read_text())
    (tmp_path / "runs" / "forgotten").mkdir()
    (tmp_path / "runs" / "forgotten" / "spec.json").write_text(json.dumps({**spec, "job": "999999"}))
    (tmp_path / "runs" / "forgotten" / "job.sbatch").touch()
    job = label_of(waiting).partition("_")[0]
    try:
        said = slurm.run("env", "SQUEUE_USERS=nobody", "SQUEUE_STATES=RUNNING", *STATUS, cwd=tmp_path)
        table = {row[0]: row[2:] for row in map(str.split, said.stdout.splitlines()[1:])}
        assert table[spec["job"]][0] == "FAILED", said.stderr
        assert table[spec["job"]][1].count(":") == 2
        assert table[f"{job}_0"][:2] == table[f"{job}_1"][:2] == ["PENDING", "00:00:00"]
        assert table["999999"][0] == "unknown"
    finally:
        commands.run(["scancel", job], env=slurm.env)


@pytest.mark.full
def test_the_benchmark_of_forgotten_jobs_in_its_smallest_form(slurm: Cluster) -> None:
    """It breaks where the table changes."""
    words = ("--jobs", "2", "--rounds", "1")
    done = subprocess.run([sys.executable, "benchmarks/status_scale.py", *words], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [figure["what"] for figure in json.loads(done.stdout)["figures"]] == ["2 forgotten jobs"]
