"""What each job of a chain does at its start and at its end, with commands that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent import chain_file
from cluster_ddp.agent.job import chain
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends.job_identity import Identity
from cluster_ddp.submission.backends.slurm import due_job

__all__ = ["fake_slurm"]

STARTED = ({"number": 1, "next": "14", "checkpoint": "step-6.pt"}, {"trains": True})
CANCELLED = "slurmstepd-n1: error: *** JOB 13 ON n1 CANCELLED AT 2026-11-26T17:22:51"
LATE = f"{CANCELLED} DUE TO TIME LIMIT ***"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "a run"
    path.mkdir()
    (path / "spec.json").write_text('{"identity": {"comment": "cluster_ddp-0123456789abcdef"}}')
    (path / ".progress").write_text("step-6.pt\n")
    return path


def begin(run: Path, *words: str, most: int = 20) -> tuple[int, str, str]:
    """Job 14 begins. Its status, the id that it prints, its log."""
    env = {**os.environ, "SLURM_JOB_ID": "14", "SLURM_NTASKS": "7", "SBATCH_QOS": "x", "RANK": "0", "MINE": "it's"}
    command = [sys.executable, "-m", "cluster_ddp.agent", "link", str(run), str(most), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("records", "log", "newest", "over"),
    [
        ((), "", "step-6.pt", ""),  # nothing is known, as on a full disk
        ((*STARTED, {"continues": True}), "", "step-6.pt", ""),
        (STARTED, "", "step-6.pt", ""),  # its batch host was lost
        (STARTED, f"{CANCELLED} DUE TO PREEMPTION ***", "step-6.pt", ""),
        (STARTED, f"{CANCELLED.replace('JOB 13', 'JOB 12')} ***", "step-6.pt", ""),
        (STARTED, LATE, "step-9.pt", ""),
        (STARTED, LATE, "step-6.pt", "job 13 reached its time limit without a new checkpoint"),
        (STARTED, f"{CANCELLED} ***", "step-9.pt", "job 13 was cancelled"),
        (STARTED, f"{CANCELLED} DUE to SIGNAL Terminated ***", "step-9.pt", "job 13 was cancelled"),  # 26.05
        ((*STARTED, {"continues": False}), "", "step-6.pt", "job 13 has ended the training"),
        (STARTED[:1], "", "step-6.pt", "job 13 ended before it started its ranks"),  # such as at module load
        (({"number": 2},), "", "step-6.pt", "job 13 has begun in its place"),
        (({"number": 0},), "", "step-6.pt", "job 13 has resumed the run"),
    ],
)
def test_a_job_first_looks_whether_anything_is_left_to_do(
    fake_slurm: FakeSlurm, run: Path, records: tuple[dict, ...], log: str, newest: str, over: str
) -> None:
    fake_slurm.command("sbatch", "echo 15")
    for record in records:
        chain_file.note(run, "13", record)
    (run / "job.log").write_text(f"{log}\n")
    (run / ".progress").write_text(f"{newest}\n")
    status, following, said = begin(run, "12", "2")
    if over:
        assert (status, following) == (chain.OVER, "")
        assert said == f"Job 14, the 3rd of the chain of job 12: nothing is left to do: {over}.\n"
        assert fake_slurm.calls("sbatch") == []
    else:
        assert (status, following) == (0, "15"), said


def test_what_the_next_job_gets(fake_slurm: FakeSlurm, run: Path) -> None:
    fake_slurm.command("sbatch", "echo 15")
    fake_slurm.command("scontrol", "echo '   ReqNodeList=(null) ExcNodeList=n[3-4]'")
    assert begin(run, "12", "2") == (0, "15", "Job 14, the 3rd of the chain of job 12; after it: job 15.\n")
    options = ["--parsable", "--dependency=afterany:14", f"--output={run}/job.log"]
    options += ["--comment=cluster_ddp-0123456789abcdef", "--exclude=n[3-4]"]
    assert fake_slurm.calls("sbatch") == [[*options, f"{run}/job.sbatch", "12", "3"]]
    env = fake_slurm.env("sbatch")
    assert env["MINE"] == "it's"
    assert not [name for name in env if name.startswith(("SLURM_", "SBATCH_", "RANK"))]
    assert chain_file.read(run) == chain_file.Chain(("14",), "15")


def test_a_job_that_is_the_last_or_that_slurm_lets_submit_none(fake_slurm: FakeSlurm, run: Path) -> None:
    assert begin(run, "12", "2", most=2)[:2] == (0, "")
    assert fake_slurm.calls("sbatch") == []
    fake_slurm.command("sbatch", "echo 'sbatch: error: Access/permission denied' >&2; exit 1")
    status, following, said = begin(run)
    assert (status, following) == (0, "")
    assert "Slurm said: sbatch: error: Access/permission denied" in said
    assert len(fake_slurm.calls("sbatch")) == 1
    assert chain_file.read(run).why == "sbatch: error: Access/permission denied"


def test_a_chain_that_is_cancelled_while_a_job_submits_the_next(fake_slurm: FakeSlurm, run: Path) -> None:
    """`cancel` marks the run directory, then reads which jobs there are; a job writes, then looks for the mark."""
    fake_slurm.command("sbatch", f"touch '{run}/.cancelled'; echo 15")
    assert begin(run)[:2] == (chain.OVER, "")
    assert fake_slurm.calls("scancel") == [["15"]]
    assert begin(run, "12", "2")[:2] == (chain.OVER, "")
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.parametrize(
    ("why", "state", "continues", "said"),
    [
        ("Stopped in time", "PENDING", True, "Stopped in time: continues in job 15, the 3rd of the chain.\n"),
        ("Stopped in time", "", False, "error: Stopped in time, but no job follows: job 15 was cancelled.\n"),
        ("", "PENDING", False, ""),
    ],
)
def test_the_end_of_a_job(
    capfd, fake_slurm: FakeSlurm, run: Path, why: str, state: str, continues: bool, said: str
) -> None:
    fake_slurm.command("squeue", f"echo {state}")
    fake_slurm.command("sinfo", "seq -f n%g 9")
    fake_slurm.command("scontrol", '[[ $2 == job ]] && echo "ReqNodeList=(null) ExcNodeList=n1" || echo "${3//,/ }"')
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "14", "SLURM_RESTART_COUNT": "1"}
    assert chain.end(run, "15", env, why, {"n2": "its disk"}, 1) is continues
    assert capfd.readouterr().err.endswith(said)
    assert fake_slurm.calls("scancel") == ([] if continues else [["15"]])
    updates = [call for call in fake_slurm.calls("scontrol") if call[0] == "update"]
    assert updates == ([["update", "JobId=15", "ExcNodeList=n1,n2"]] if continues else [])
    assert json.loads((run / "chain.jsonl").read_text())["continues"] is continues


@pytest.mark.parametrize(
    ("last", "following", "due"),
    [("RUNNING", "PENDING", 13), ("FAILED", "PENDING", 14), ("COMPLETED", "CANCELLED", 13), ("", "RUNNING", 14)],
)
def test_the_job_that_is_due(last: str, following: str, due: int) -> None:
    """Where a site drops comments, the time of submission tells no job of a chain from another one with its id."""
    jobs = {
        job: JobStatus(job_id=int(job), state=state, exit_code=0, signal=0, submitted_s=2e9)
        for job, state in (("13", last), ("14", following))
        if state
    }
    found = due_job(chain_file.Chain(("12", "13"), "14"), jobs, Identity(submitted_by_s=1e9))
    assert found is not None
    assert (found.job_id, found.link, found.restarts) == (due, due - 12, due - 12)
