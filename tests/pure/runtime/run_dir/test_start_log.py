"""starts.jsonl: why a training started again, and what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster_ddp.run import journal
from cluster_ddp.run.outcome import Failure, Outcome
from cluster_ddp.runtime.run_dir import start_log
from cluster_ddp.slurm.topology import Topology


def start(run_dir: Path, restart: int, *, job: int = 12, **more: float | None) -> dict:
    topology = Topology(
        launcher="srun",
        rank=0,
        local_rank=0,
        world_size=4,
        num_nodes=2,
        master_addr="n1",
        port_candidates=(1,),
        job_id=job,
        restart_count=restart,
    )
    start_log.note_start(run_dir, topology, step=10 * restart, saved_s=more.get("saved_s"), seen_s=more.get("seen_s"))
    return json.loads((run_dir / "starts.jsonl").read_text().splitlines()[-1])


class Clock:
    """time.time(), turned by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(start_log, "time", SimpleNamespace(time=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_each_start_says_why_the_one_before_ended(tmp_path: Path, clock: Clock) -> None:
    first = start(tmp_path, 0)
    expected = {"kind": "start", "version": 1, "restart": 0, "job": "12", "step": 0, "ranks": 4, "nodes": 2}
    expected["master_addr"] = "n1"
    assert {name: value for name, value in first.items() if name != "time"} == expected

    clock.now = 1200.0
    start_log.note_end(tmp_path, "Stopped in time: n1 got USR1.", state="STOPPED", saved=True)
    start_log.note_non_finite(tmp_path, 7, "NaN or Inf in model w")  # says nothing of how it ended
    again = start(tmp_path, 1, saved_s=1100.0, seen_s=1130.0)
    assert (again["cause"], again["lost_s"], again["step"]) == ("Stopped in time: n1 got USR1.", 0.0, 10)

    clock.now = 1300.0
    journal.append_end(tmp_path, Outcome("12", 1, "FAILED", 1, Failure(2, "n1", 1, "ValueError: bad")), shared=False)
    again = start(tmp_path, 2, saved_s=1250.0, seen_s=1280.04)
    assert (again["cause"], again["lost_s"]) == ("Failed first: rank 2 on n1: ValueError: bad", 30.0)

    clock.now = 1400.0
    again = start(tmp_path, 3, saved_s=1390.0, seen_s=1380.0)
    assert again["cause"] == "It ended without a final record: it was killed, or its node was lost."
    assert "lost_s" not in again  # it was seen alive only now and then: perhaps something was lost


def test_a_training_that_fails_after_its_end_is_not_said_to_have_ended_well(tmp_path: Path, clock: Clock) -> None:
    start(tmp_path, 0)
    clock.now = 1200.0
    start_log.note_end(tmp_path, "The training reached its end.", state="COMPLETED", saved=False)
    journal.append_end(
        tmp_path, Outcome("12", 0, "FAILED", 1, Failure(0, "n1", 1, "No space left on device")), shared=False
    )
    again = start(tmp_path, 1, saved_s=1100.0, seen_s=1190.0)
    assert (again["cause"], again["lost_s"]) == ("Failed first: rank 0 on n1: No space left on device", 90.0)
    start_log.note_end(tmp_path, "The training reached its end.", state="COMPLETED", saved=True)
    longer = start(tmp_path, 0, job=13)  # a user lets it train for more epochs
    assert (longer["cause"], longer["lost_s"]) == ("The training reached its end.", 0.0)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("srun: error: Node failure on node2\nRestart 2 of job 12.\nx\n", "node2 is lost (node failure)."),
        (
            "*** JOB 12 ON n1 CANCELLED AT x DUE TO NODE FAILURE ***\nRestart 2 of job 12.\n",
            "a node of the job is lost (node failure).",
        ),
        (
            "Restart 2 of job 12.\n",
            "It ended without a final record, and Slurm has none either: its first node, n1, was probably lost.",
        ),
        (
            "*** JOB 12 ON n1 CANCELLED AT x DUE TO JOB REQUEUE ***\nRestart 2 of job 12.\n",
            "It ended without a final record: it was killed, or its node was lost.",
        ),
    ],
)
def test_what_the_jobs_log_says_of_the_start_before(tmp_path: Path, said: str, cause: str) -> None:
    start(tmp_path, 1)
    """If no record of that start is there: its agent was lost."""
    (tmp_path / "job.log").write_text(f"srun: error: Node failure on n9\nRestart 1 of job 12.\n{said}")
    journal.append_end(
        tmp_path, Outcome("12", 0, "FAILED", 1, Failure(3, "n1", 1, "ValueError: of an earlier start")), shared=False
    )
    assert start(tmp_path, 2)["cause"] == cause


LOST = Outcome("12", 0, "FAILED", 137, None, ("n2", "n3"))


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (LOST, "n2, n3 are lost (node failure)."),
        (LOST._replace(first=Failure(1, "n1", 143, "killed by SIGTERM")), "n2, n3 are lost (node failure)."),
        (
            LOST._replace(first=Failure(1, "n1", 1, "KeyError: y")),
            "Failed first: rank 1 on n1: KeyError: y; n2, n3 are lost (node failure)",
        ),
        (Outcome("12", 0, "FAILED", 3, Failure(1, "n1", 3, "")), "Failed first: rank 1 on n1"),
        (Outcome("12", 0, "FAILED", 3), "It ended with status 3."),
        (Outcome("12", 0, "STOPPED", 75), "It was stopped in time."),
        (Outcome("12", 0, "TIMEOUT", 1), "It reached its time limit."),
        (Outcome("12", 0, "CANCELLED", 143), "It was cancelled."),
        (Outcome("13", 0, "FAILED", 3), "It ended without a final record: it was killed, or its node was lost."),
    ],
)
def test_the_record_of_the_start_before_counts_before_the_log(tmp_path: Path, ended: Outcome, cause: str) -> None:
    start(tmp_path, 0)
    journal.append_end(tmp_path, ended, shared=False)
    assert start(tmp_path, 1)["cause"] == cause


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    start(tmp_path, 0)
    (tmp_path / "job.jsonl").write_text('{"event": "end", "job": "12", "st')
    assert start(tmp_path, 1)["cause"] == "It ended without a final record: it was killed, or its node was lost."


def test_the_record_of_the_job_that_was_resumed(tmp_path: Path) -> None:
    """The new job's record says nothing of the start before."""
    start(tmp_path, 0, job=3)
    journal.append_end(
        tmp_path, Outcome("3", 1, "FAILED", 137, Failure(3, "n2", 137, "killed by SIGKILL")), shared=False
    )
    assert start(tmp_path, 0, job=4)["cause"] == "Failed first: rank 3 on n2: killed by SIGKILL"
    (tmp_path / "job-4").mkdir()
    (tmp_path / "job-4" / "job.log").write_text("Restart 1 of job 4.\nsrun: error: Node failure on n2\n")
    journal.append_end(tmp_path, Outcome("5", 0, "FAILED", 1, Failure(0, "n1", 1, "of the new job")), shared=False)
    assert start(tmp_path, 0, job=5)["cause"] == "n2 is lost (node failure)."
    assert start(tmp_path, 0, job=6)["cause"] == "Failed first: rank 0 on n1: of the new job"  # nothing was moved
    journal.append_end(tmp_path, Outcome("6", 0, "FAILED", 1, Failure(0, "n1", 1, "of an earlier start")), shared=False)
    start(tmp_path, 1, job=6)
    assert start(tmp_path, 0, job=7)["cause"] == "It ended without a final record: it was killed, or its node was lost."


def test_what_an_earlier_start_lost_and_the_queue_count_for_no_later_one(tmp_path: Path, clock: Clock) -> None:
    """A checkpoint of four hours ago; the start after it was killed after 25 seconds, before it saved."""
    start(tmp_path, 0)
    clock.now += 4 * 3600
    start(tmp_path, 1, saved_s=1100.0, seen_s=1200.0)
    clock.now += 30
    assert start(tmp_path, 2, saved_s=1100.0, seen_s=clock.now - 5)["lost_s"] == 25.0


@pytest.mark.parametrize(("seen_s", "lost_s"), [(0.0, None), (1030.0, 30.0), (9e9, 60.0)])
def test_a_clock_that_is_wrong_makes_no_nonsense(seen_s: float, lost_s: float, tmp_path: Path, clock: Clock) -> None:
    start(tmp_path, 0)
    clock.now += 60
    assert start(tmp_path, 1, seen_s=seen_s).get("lost_s") == lost_s


def test_without_a_checkpoint_all_since_the_start_is_lost(tmp_path: Path, clock: Clock) -> None:
    began = start(tmp_path, 0)["time"]
    clock.now += 100
    start_log.note_end(tmp_path, "x", state="STOPPED", saved=False)
    assert start(tmp_path, 1, seen_s=began + 60)["lost_s"] == 60.0
    assert "lost_s" not in start(tmp_path, 2)  # it wrote no record


@pytest.mark.parametrize("name", ["missing", "file"])
def test_no_training_needs_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    start_log.note_end(tmp_path / name, "x", state="STOPPED", saved=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
