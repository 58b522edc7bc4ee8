"""What each job of a chain does at its start and at its end, with commands that stand in for Slurm's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent.job import chain
from cluster_ddp.agent.job.chain import ChainLink
from cluster_ddp.run import journal
from cluster_ddp.run.journal import Event
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends.slurm import due_job

__all__ = ["fake_slurm"]

CANCELLED = "slurmstepd-n1: error: *** JOB 14 ON n1 CANCELLED AT 2026-11-26T17:22:51"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "a run"
    path.mkdir()
    (path / ".progress").write_text("step-6.pt\n")
    return path


def note(run: Path, event: str, **values: Any) -> None:
    assert journal.append(run, event, shared=False, job="12", **values)


def began(run: Path, number: int, *, checkpoint: str = "step-6.pt", trains: bool = True, then: str = "") -> None:
    """Note how far a job of the chain came. Their ids are 13, 14 …"""
    note(run, Event.LINK, number=number, requeue=number, slurm_job=str(13 + number), checkpoint=checkpoint)
    if trains:
        note(run, Event.START, start=number, requeue=number)
    if then:
        note(run, Event.END, start=number, state="STOPPED", status=75, then=then)


def begin(run: Path, number: int, **more: str) -> tuple[int, str]:
    """The job with this number begins. Its status, its log."""
    task = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": str(number), "SLURM_JOB_ID": str(13 + number)}
    command = [sys.executable, "-m", "cluster_ddp.agent", "chain", str(run)]
    done = subprocess.run(command, env={**os.environ, **task, **more}, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("before", "log", "newest", "over"),
    [
        ({}, "", "step-9.pt", ""),  # its batch host was lost
        ({}, f"{CANCELLED} DUE TO PREEMPTION ***", "step-9.pt", ""),
        ({}, f"{CANCELLED} DUE TO TIME LIMIT ***", "step-9.pt", ""),
        ({}, f"{CANCELLED.replace('JOB 14', 'JOB 13')} ***", "step-9.pt", ""),
        ({}, f"{CANCELLED} ***", "step-9.pt", "job 12_1 was cancelled"),
        ({}, f"{CANCELLED} DUE to SIGNAL Terminated ***", "step-9.pt", "job 12_1 was cancelled"),  # 26.05
        ({}, "", "step-6.pt", "jobs 12_0 and 12_1 ended without a new checkpoint"),
        ({"checkpoint": "step-8.pt"}, "", "step-8.pt", ""),  # there was one in the job before
        ({"then": "requeue"}, "", "step-6.pt", ""),
        ({"then": "end"}, "", "step-9.pt", "job 12_1 has ended the training"),
        ({"trains": False}, "", "step-9.pt", "job 12_1 ended before it started its ranks"),  # such as at module load
    ],
)
def test_a_job_first_looks_whether_anything_is_left_to_do(
    fake_slurm: FakeSlurm, run: Path, before: dict[str, Any], log: str, newest: str, over: str
) -> None:
    began(run, 0)
    began(run, 1, **before)
    (run / "job.log").write_text(f"{log}\n")
    (run / ".progress").write_text(f"{newest}\n")
    assert begin(run, 2) == ((chain.OVER, f"Job 12_2: nothing is left to do: {over}.\n") if over else (0, ""))
    assert fake_slurm.calls("scancel") == ([["--state=PENDING", "12"]] if over else [])
    assert [one.number for one in chain.links(run, "12")] == ([0, 1] if over else [0, 1, 2])


def test_where_nothing_is_known_a_job_runs(fake_slurm: FakeSlurm, run: Path) -> None:
    """As on a full disk."""
    assert begin(run, 3) == (0, "")
    assert chain.links(run, "12") == [ChainLink(3, 3, "16", "step-6.pt")]


def test_a_job_that_somebody_requeued_runs_and_counts_again(fake_slurm: FakeSlurm, run: Path) -> None:
    for number in (0, 1):
        began(run, number, then="requeue" if number == 0 else "end")
    assert begin(run, 1, SLURM_RESTART_COUNT="1") == (0, "")
    note(run, Event.START, start=2, requeue=2)
    note(run, Event.END, start=2, state="STOPPED", status=75, then="requeue")
    assert begin(run, 2) == (0, "")
    assert [(one.number, one.requeue) for one in chain.links(run, "12")] == [(0, 0), (1, 1), (1, 2), (2, 3)]
    env = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "15", "SLURM_ARRAY_TASK_MAX": "20"}
    env["SLURM_RESTART_COUNT"] = "1"
    of_job = {"CLUSTER_DDP_CHAIN": "12", "SLURM_JOB_ID": "15", "SLURM_RESTART_COUNT": "3"}
    of_job["CLUSTER_DDP_SLURM_RESTARTS"] = "1"
    assert chain.in_chain(run, env) == of_job
    assert chain.in_chain(run / "unknown", env) == of_job | {"SLURM_RESTART_COUNT": "2"}


def test_a_chain_that_begins_anew_has_no_job_before(fake_slurm: FakeSlurm, run: Path) -> None:
    """A cluster that was set up anew counts from 1 again."""
    began(run, 0, then="end")
    assert begin(run, 0) == (0, "")
    assert len(chain.links(run, "12")) == 1


@pytest.mark.parametrize(
    ("number", "why", "pending", "said"),
    [
        (1, "Stopped in time", "2 3", "Stopped in time: continues in job 12_2.\n"),
        (1, "Stopped in time", "3", "error: Stopped in time, but no job follows: job 12_2 was cancelled.\n"),
        (3, "Failed", "", "error: Failed, but no job follows: --max-requeues is reached.\n"),
        (1, "", "2 3", ""),
    ],
)
def test_the_end_of_a_job(capfd, fake_slurm: FakeSlurm, number: int, why: str, pending: str, said: str) -> None:
    fake_slurm.command("squeue", f"printf '%s\\n' {pending}")
    fake_slurm.command("sinfo", "seq -f n%g 9")
    fake_slurm.command("scontrol", '[[ $2 == job ]] && echo "ReqNodeList=(null) ExcNodeList=n1" || echo "${3//,/ }"')
    env = {"PATH": os.environ["PATH"], "CLUSTER_DDP_CHAIN": "12"}
    continues = chain.end(env, number, why, leave={"n2": "its disk"}, most=3)
    assert continues is ("continues" in said)
    assert capfd.readouterr().err.endswith(said)
    assert fake_slurm.calls("scancel") == ([] if continues else [["--state=PENDING", "12"]])
    updates = [call for call in fake_slurm.calls("scontrol") if call[0] == "update"]
    assert updates == ([["update", "JobId=12_2-3", "ExcNodeList=n1,n2"]] if continues else [])


def task(number: str, state: str) -> JobStatus:
    return JobStatus(job_id=13, state=state, exit_code=0, signal=0, array_task=number)


@pytest.mark.parametrize(
    ("begun", "tasks", "due"),
    [
        (None, [("0-20%1", "PENDING")], (0, "PENDING")),
        (None, [("0-20%1", "CANCELLED")], (0, "CANCELLED")),
        (1, [("0", "FAILED"), ("1", "RUNNING"), ("2-20%1", "PENDING")], (1, "RUNNING")),
        (1, [("0", "FAILED"), ("1", "FAILED"), ("2-20%1", "PENDING")], (2, "PENDING")),
        (1, [("0", "FAILED"), ("1", "CANCELLED"), ("2-20", "CANCELLED")], (1, "CANCELLED")),
        (1, [("0", "FAILED"), ("2", "RUNNING")], (2, "RUNNING")),  # it has not looked yet
        (1, [], None),
    ],
)
def test_the_job_that_is_due(
    run: Path, begun: int | None, tasks: list[tuple[str, str]], due: tuple[int, str] | None
) -> None:
    if begun is not None:
        began(run, begun)
    found = due_job(run, "12", [task(*one) for one in tasks])
    assert (found and (found.link, found.state)) == due
    assert found is None or (found.restarts, found.array_task) == (found.link, None)
