"""Chains of jobs: warned, cut from their batch host, cancelled, failed, refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from chaos import faults
from cluster import Place, differing, output
from paced_run import ONE_BASH, Run, held, start

from cluster_ddp.agent import chain_file
from cluster_ddp.run.names import File
from cluster_ddp.slurm import commands, job_status

pytestmark = pytest.mark.every_slurm


@pytest.fixture
def cli(place: Place):
    def run(*words: str) -> str:
        done = place.slurm.run(sys.executable, "-m", "cluster_ddp", *words, cwd=place.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def states(run: Run) -> list[str]:
    """Of its chain's jobs, once none is left in the queue."""
    jobs = chain_file.read(run.path).all

    def seen() -> list[str]:
        return [job_status.job_statuses(job, env=run.place.slurm.env)[0].state for job in jobs]

    run.wait_for(lambda: {*seen()} <= job_status.FINAL_STATES)
    assert chain_file.read(run.path).all == jobs
    queued = ("squeue", "--noheader", f"--name={run.path.name.rpartition('-')[0]}")
    run.wait_for(lambda: not commands.run(queued, env=run.place.slurm.env).strip())
    return seen()


@pytest.mark.full
def test_a_chain_is_warned_and_loses_its_batch_host(place: Place, uninterrupted: list[dict]) -> None:
    """Each time the next job resumes, exactly; the one that would follow the last is gone at its end."""
    run = start(place, "--chain", FAULTS=[held(12), held(30, start=1)])
    run.wait_for_step(6)
    run.slurm("scancel", "--signal=USR1", run.job)
    run.wait_for_step(18)
    lost = run.nodes()[0]
    faults.lose_node(place.slurm.layout, lost)
    run.slurm("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")  # as Slurm finds in a minute
    try:
        run.wait_for(lambda: len(chain_file.read(run.path).jobs) == 3)
        assert states(run) == ["FAILED", "NODE_FAIL", "COMPLETED", "CANCELLED"]
    finally:
        faults.bring_back_node(place.slurm.layout, lost)
    said = output(run.path)
    assert said.count("Resuming from") == 2
    starts = [json.loads(line) for line in (run.path / File.STARTS).read_text().splitlines()]
    assert [(one["job"], one["restart"]) for one in starts if one["kind"] == "start"] == [
        (run.job, number) for number in range(3)
    ]
    assert run.metrics() == uninterrupted


FIRST = 'env -0 >"env-$SLURM_JOB_ID"; if ((!SLURM_RESTART_COUNT)); then exit 75; fi; '
THEN = {"cancel": "sleep 300", "scancel": "sleep 300", "fails": "exit 3", "most": "exit 75"}
OF_THE_SHELL = {"SBATCH_QOS": "leaks", "SLURM_NTASKS": "7", "MINE": "it's\nmine"}


@pytest.mark.full
def test_what_ends_a_chain(place: Place, cli) -> None:
    """Cancelled as a whole; its second job by scancel; a final failure there; --max-requeues. No job is left."""
    runs = {}
    for name, then in THEN.items():
        options = ("--no-check", *ONE_BASH, "--chain", "--max-requeues", "1" if name == "most" else "20")
        done = place.submit(*options, "--name", name, "--", "bash", "-c", FIRST + then, env=OF_THE_SHELL)
        assert done.returncode == 0, done.stderr
        runs[name] = Run(place, place.named_by(done.stdout))
    for name, run in runs.items():
        run.wait_for(lambda run=run: [one for one in chain_file.records(run.path) if "trains" in one][1:])
        second = chain_file.read(run.path).jobs[1]
        if name == "cancel":
            assert f"Job {second} is the 2nd of the chain of job {run.job}." in cli("status", second)
            assert f"Cancelled job {second} and its chain" in cli("cancel", run.job)
        elif name == "scancel":
            run.slurm("scancel", second)
    ends = {name: states(run) for name, run in runs.items()}
    assert ends == {
        "cancel": ["FAILED", "CANCELLED", "CANCELLED"],
        "scancel": ["FAILED", "CANCELLED", "COMPLETED"],
        "fails": ["FAILED", "FAILED", "CANCELLED"],
        "most": ["FAILED", "FAILED"],
    }
    jobs = {name: chain_file.read(run.path).all for name, run in runs.items()}
    assert f"nothing is left to do: job {jobs['scancel'][1]} was cancelled." in output(runs["scancel"].path)
    assert "started again 1 times already (--max-requeues 1)" in output(runs["most"].path)
    shown = json.loads(cli("status", "--json", *(str(run.path) for run in runs.values())))
    assert [(one["job"], one["state"]) for one in shown] == [(jobs[name][1], ends[name][1]) for name in ends]
    where = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HOSTNAME")
    of_slurm = ("SLURM_", "SLURMD_NODENAME", "CLUSTER_DDP_", "MASTER_ADDR", "MASTER_PORT", *where)
    first, second = (
        {key: value for key, value in environ(place, job).items() if not key.startswith(of_slurm)}
        for job in jobs["fails"][:2]
    )
    assert differing(first, second) == {}
    assert first["MINE"] == OF_THE_SHELL["MINE"]


def environ(place: Place, job: str) -> dict[str, str]:
    text = (place.folder / f"env-{job}").read_bytes().decode()
    return dict(one.split("=", 1) for one in text.split("\0") if one)


NO_SBATCH = """#!/bin/bash
[[ $(hostname) == node* ]] && { echo "sbatch: error: Batch job submission failed: Access/permission denied"; exit 1; }
exec %s "$@"
"""


def test_a_chain_where_nodes_may_not_submit(place: Place, cli, tmp_path: Path) -> None:
    """Refused where that can be known; else the job says so, in its log and in its status, and trains.

    All hosts of a sandbox are one for AllocNodes: they share a munged.
    """
    options = (*ONE_BASH, "--chain", "--", "bash", "-c", "true")
    run_as_admin(place, "create", "PartitionName=login", "Nodes=ALL", "AllocNodes=login1")
    try:
        refused = place.submit("--partition", "login", *options)
    finally:
        run_as_admin(place, "delete", "PartitionName=login")
    assert refused.returncode == 2
    assert "partition login takes jobs from login1 only (AllocNodes), not from node1." in refused.stderr
    path = place.slurm.env["PATH"]
    (tmp_path / "sbatch").write_text(NO_SBATCH % shutil.which("sbatch", path=path))
    (tmp_path / "sbatch").chmod(0o755)
    done = place.submit("--no-check", *options, env={"PATH": f"{tmp_path}:{path}"})
    run = Run(place, place.named_by(done.stdout))
    assert "error: Submitting the next job of the chain on node" in run.completed(restarts=0)
    (shown,) = json.loads(cli("status", "--json", str(run.path)))
    assert shown["end_of_chain"].endswith("Access/permission denied")


def run_as_admin(place: Place, *words: str) -> None:
    commands.run(["scontrol", *words], env=place.slurm.env)
