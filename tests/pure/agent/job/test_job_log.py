"""agent.job.job_log: the last lines of a job's log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.agent.job import job_log
from cluster_ddp.run.outcome import FOR_MEMORY, Failure, Outcome

FAILED = Outcome("12", 0, "FAILED", 3, Failure(1, "node2", 3, "ValueError: x"))


def test_what_failed_first_is_said_with_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (log := tmp_path / "it's task-1.log").touch()
    job_log.show(FAILED, log, {})
    first = "Failed first, with status 3: rank 1 on node2: ValueError: x\n"
    assert capfd.readouterr().err == f"{first}  Its log: {log}\n"
    for missing in (None, tmp_path / "none"):
        job_log.show(FAILED, missing, {})
        assert capfd.readouterr().err == first
    job_log.show(Outcome("12", 0, "COMPLETED", 0), log, {})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("env", "than"), [({}, ""), ({"SLURM_MEM_PER_NODE": "500"}, " than 500 MB")])
def test_more_memory_is_the_hint(env: dict[str, str], than: str, capfd: pytest.CaptureFixture[str]) -> None:
    job_log.show(FAILED._replace(first=Failure(1, "node2", 137, FOR_MEMORY)), None, env)
    assert f"  Hint: ask for more memory per node{than}: --mem, or as needed: --max-mem; " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("status", "has_checkpoint", "resume", "said"),
    [(75, True, "x", True), (1, True, "x", True), (0, True, "x", False), (1, False, "x", False), (1, True, "", False)],
)
def test_how_to_resume_is_said_where_there_is_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, has_checkpoint: bool, resume: str, said: bool
) -> None:
    if has_checkpoint:
        (tmp_path / "checkpoints").mkdir()
    job_log.show_how_to_resume(status, {"CLUSTER_DDP_RUN_DIR": str(tmp_path), "CLUSTER_DDP_RESUME": resume})
    assert capfd.readouterr().err == (f"To resume: {resume}\n" if said else "")


def test_only_what_this_start_has_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "task-0.log").write_text("of an earlier start\n")
    logs = job_log.Logs(tmp_path)
    with (tmp_path / "task-0.log").open("ab") as file:
        file.write(b"of this one\0\xff\n" + b"x" * 10)
    (tmp_path / "task-1.log").write_text("new\n")
    assert logs.of(tmp_path / "task-0.log") == "of this one\ufffd\n" + "x" * 10
    assert logs.of(tmp_path / "task-1.log") == "new\n"
    assert logs.of(tmp_path / "none") == logs.of(tmp_path) == ""


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    logs = job_log.Logs(tmp_path)
    (tmp_path / "task-0.log").write_text("first\n" + "x" * 200_000 + "\nlast\n")
    text = logs.of(tmp_path / "task-0.log")
    assert text.endswith("\nlast\n") and "first" not in text and len(text) < 150_000


def test_a_full_disk_is_no_reason_to_fail() -> None:
    code = "from cluster_ddp.agent.job import job_log; job_log.say('x'); print('still here')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "still here\n"


def test_no_control_character_gets_through(capfd: pytest.CaptureFixture[str]) -> None:
    """Who may write to the run directory could change the terminal of who reads the log."""
    job_log.say("Left out: node1: \x1b[2Jsick\n  Hint:\tdrain it")
    assert capfd.readouterr().err == "Left out: node1: ?[2Jsick\n  Hint: drain it\n"
