"""Jobs of two clusters with the same id: a sandbox that is made anew counts from the same number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import demo
import pytest
from cluster import Cluster, Place, sandbox_name, skip_without_slurm

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import cluster
from cluster_ddp.slurm import commands, job_status


@contextmanager
def new_cluster(folder: Path) -> Iterator[Place]:
    """A cluster of one name, set up anew each time."""
    name = sandbox_name("ids")
    try:
        layout = cluster.up(name, nodes=1, gpus_per_node=1)
    except SandboxError as error:
        skip_without_slurm(error)
    try:
        env = cluster.environment(name)
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        yield Place(Cluster(layout, env), folder)
    finally:
        cluster.down(name)


def verb(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    return place.slurm.run(sys.executable, "-m", "cluster_ddp", *words, cwd=place.folder)


def own_sbatch(place: Place, *options: str) -> str:
    """Submit a job that no run directory knows. Its id."""
    sbatch = ["sbatch", "--parsable", "--output=/dev/null", *options]
    return commands.run([*sbatch, "--wrap=sleep 600"], env=place.slurm.env).strip()


def state(place: Place, job: str) -> str:
    return job_status.job_statuses(job, env=place.slurm.env)[0].state


def training(folder: Path, job: str) -> Path:
    """The run directory of a training that no submission has started, in a job of its own script."""
    path = folder / "runs" / "mine"
    path.mkdir()
    owner = {"job": job, "cluster": "far", "host": "n1", "process": 7, "since": "2026-01-01 00:00:00"}
    (path / ".lock").write_text(json.dumps(owner))
    return path


@pytest.mark.fault(
    "another job now has the id of an ended run (a second cluster, a new sandbox)",
    "that job is neither ended nor shown; `cancel RUN_DIR`: `job 12 is another job now`",
    bound="at once",
    also=("test_a_second_demo_shows_its_own_job",),
)
@pytest.mark.usefixtures("machine")
@pytest.mark.full
def test_ids_of_another_cluster_are_not_those_of_this_one(tmp_path: Path) -> None:
    """Nothing is ended, or shown of a run, because its id is another job's now. An id means the job that lives."""
    with new_cluster(tmp_path) as place:
        first = place.start("--name", "ended", "--gpus-per-node", "1", "--", "echo", "hello of the first")
        place.completed(first)
        array = place.start("--name", "sweep", "--gpus-per-node", "1", "--array", "a=1,2", "--", "true", "{a}")
        place.completed(array)
    label = first.name.removeprefix("ended-")
    with new_cluster(tmp_path) as place:
        second = place.start("--name", "lives", "--gpus-per-node", "1", "--", "bash", "-c", "echo hello; sleep 600")
        assert second.name == f"lives-{label}"
        own = own_sbatch(place)
        assert array.parent.name == f"sweep-{own}"
        unsubmitted = training(tmp_path, own)
        for run in (str(first), str(array), str(array.parent), str(unsubmitted)):
            done = verb(place, "cancel", run)
            refused = re.search("is another job now|Invalid job id", done.stderr)
            assert (done.returncode, bool(refused)) == (2, True), done.stdout + done.stderr
        assert state(place, label) in ("PENDING", "RUNNING", "CONFIGURING")
        assert state(place, own) in ("PENDING", "RUNNING", "CONFIGURING")
        shown = {row["name"]: row for row in json.loads(verb(place, "status", "--json").stdout)}
        assert {name for name, row in shown.items() if row["elapsed"]} == {"lives"}
        assert [row["name"] for row in json.loads(verb(place, "status", "--json", label).stdout)] == ["lives"]
        assert [row["status"]["name"] for row in json.loads(verb(place, "report", "--json", label).stdout)] == ["lives"]
        assert verb(place, "logs", str(first)).stdout == "hello of the first\n"
        assert "hello of the first" not in verb(place, "logs", label).stdout
        again = place.submit("--no-check", "--resume", str(first))
        assert (again.returncode, "is for one job at a time" in again.stderr) == (0, False), again.stderr
        assert "Cancelled job" in verb(place, "cancel", label).stdout
        assert state(place, label) in ("CANCELLED", "COMPLETING")


@pytest.mark.usefixtures("machine")
def test_a_requeued_job_with_a_comment_of_its_own_is_still_that_of_its_run(tmp_path: Path) -> None:
    """Its submit time is that of its requeue. A stranger's comment, whatever it holds, hides no job."""
    with new_cluster(tmp_path) as place:
        comment = "ü" * 13 + "\n3  x\n" + "3".ljust(126) + "1"
        own_sbatch(place, f"--comment={comment}")
        jobs = []
        for words in (("--sbatch-options=--comment=mine",), ()):
            run_dir = place.start("--gpus-per-node", "1", *words, "--", "sleep", "600")
            jobs.append(re.search(r"\d+$", run_dir.name)[0])
        for job in jobs:
            while state(place, job) != "RUNNING":
                pass
            commands.run(["scontrol", "requeue", job], env=place.slurm.env)
        env = {**os.environ, **place.slurm.env, "SLURM_TIME_FORMAT": "relative"}
        command = [sys.executable, "-m", "cluster_ddp", "status", "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        rows = {row["job"]: row["requeues"] for row in json.loads(done.stdout)}
        assert rows == dict.fromkeys(jobs, 1), done.stderr
        for job in jobs:
            assert verb(place, "cancel", job).returncode == 0


DEMO = """\
#!/bin/bash
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
mkdir -p "$2"
echo "a demo in $2"
echo '{"kind": "test", "epoch": 1, "accuracy": 1.0}' >"$2/metrics.jsonl"
echo '{"topology": {"world_size": 1}}' >"$2/run.json"
"""


@pytest.mark.usefixtures("machine")
def test_a_second_demo_shows_its_own_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both jobs have one id and one name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "JOB", tmp_path / "demo.sbatch")
    demo.JOB.write_text(DEMO)
    shown = []
    for _ in range(2):
        with new_cluster(tmp_path) as place:
            assert demo._on_slurm([], place.slurm.env) == 0
        shown.append(re.findall(r"job \d+$|a demo in .*", capsys.readouterr().out, re.MULTILINE))
    assert [len(lines) for lines in shown] == [2, 2]
    assert shown[0][0] == shown[1][0] and shown[0][1] != shown[1][1]
