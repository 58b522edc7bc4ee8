"""Following a job, against a scheduler that tells a story."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import make_run, write_lines

from cluster_ddp.errors import JobNotFoundError, SlurmError
from cluster_ddp.jobs import watch
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.slurm.reasons import of_waiting
from cluster_ddp.submission import job
from cluster_ddp.submission.job import Job


def status(state: str, **fields) -> JobStatus:
    values = {"job_id": 12, "reason": "None", "exit_code": 0, "signal": 0, "stdout": "", **fields}
    return JobStatus(state=state, **values)


class Story:
    """Answers with one chapter after the other; a chapter is statuses, an error, or something to do first."""

    script_name = ""

    def __init__(self, chapters: list) -> None:
        self.chapters: Iterator = iter(chapters)

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        chapter = next(self.chapters)
        if callable(chapter):
            chapter = chapter()
        if isinstance(chapter, BaseException):
            raise chapter
        return chapter


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LOG_POLL_S", 0.0)
    monkeypatch.setattr(job, "_FIRST_POLL_S", 0.0)


def follow(tmp_path: Path, chapters: list, ids: tuple[str, ...] = ("12",)) -> tuple[int, list[str]]:
    story, lines = Story(chapters), []
    jobs = [Job(id=one, run_dir=tmp_path, ranks=2, scheduler=story) for one in ids]  # type: ignore[arg-type]
    return watch.follow(jobs, show=lines.append), lines


def test_from_pending_to_the_end(tmp_path: Path) -> None:
    def writing() -> list[JobStatus]:
        (tmp_path / "task-0.log").write_text("one\ntwo\nthr")
        return [status("RUNNING")]

    def more() -> list[JobStatus]:
        (tmp_path / "task-0.log").write_text("one\ntwo\nthree\n")
        (tmp_path / "task-1.log").write_text("oh")
        return [status("COMPLETED", elapsed="00:01:00")]

    pending = [[status("PENDING", reason="Resources", expected_start=f"2099-11-21T10:0{i}:00")] for i in range(3)]
    outcome, lines = follow(tmp_path, [*pending, writing, more])
    assert outcome == 0
    assert lines == [
        f"job 12: PENDING ({of_waiting('Resources')}), expected to start at about 2099-11-21 10:00",
        "job 12: RUNNING",
        *("one", "two", "three", "[task-1] oh"),
        "job 12: COMPLETED after 00:01:00",
    ]


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        (status("FAILED", exit_code=3), 3, "FAILED, exit status 3"),
        (status("CANCELLED", signal=15), 143, "CANCELLED, ended by signal 15"),
        (status("TIMEOUT"), 1, "TIMEOUT"),
        (status("COMPLETED", elapsed="00:00:46", restarts=2), 0, "COMPLETED after 00:00:46 (since its last requeue)"),
    ],
)
def test_its_end_is_ours(tmp_path: Path, end: JobStatus, outcome: int, words: str) -> None:
    code, lines = follow(tmp_path, [[end]])
    assert code == outcome
    assert words in lines[0]
    assert code == 0 or str(tmp_path) in lines[1]


def test_only_a_job_that_has_saved_something_is_to_be_resumed(tmp_path: Path) -> None:
    """One that failed before it saved anything has nothing to resume."""
    files = ("spec.json", "job.sbatch", "job.log", "task-0.log", "task-1.log", "job.jsonl", "usage-0.jsonl")
    files = (*files, "run.json", "starts.jsonl", "metrics.jsonl", "trackers")  # it trained, but saved nothing
    for name in files:
        (tmp_path / name).touch()
    failed = status("FAILED", exit_code=1)
    its_logs, resume = f"Its logs: {tmp_path}", f"To resume: cluster-ddp submit --resume {tmp_path}"
    assert follow(tmp_path, [[failed]])[1][1:] == [its_logs]
    assert len(follow(tmp_path, [[failed, failed]], ids=("12_0", "12_1"))[1]) == 3
    (tmp_path / "my-model.pt").touch()
    assert follow(tmp_path, [[failed]])[1][1:] == [its_logs, resume]
    (tmp_path / "job.log").write_text(f"{resume}\n")
    assert follow(tmp_path, [[failed]])[1][2:] == [its_logs]  # after the line of the log
    (tmp_path / "job.log").write_text("To resume: cluster-ddp submit --resume /as/bash\\ spells\\ it\n")
    assert follow(tmp_path, [[failed]])[1][2:] == [its_logs]
    (tmp_path / "job.log").write_text(f"{resume}\nRestart 1 of job 12.\n")  # which Slurm has ended
    assert follow(tmp_path, [[failed]])[1][3:] == [its_logs, resume]


def test_a_start_that_is_always_now_is_not_believed(tmp_path: Path) -> None:
    """Slurm says so of a job that will not start (22.05)."""
    now = datetime.now()
    pending = [[status("PENDING", expected_start=f"{now + timedelta(seconds=i):%Y-%m-%dT%H:%M:%S}")] for i in range(3)]
    _, lines = follow(tmp_path, [*pending, [status("COMPLETED")]])
    assert lines == ["job 12: PENDING", "job 12: COMPLETED"]


def test_a_job_that_prints_nothing_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not if a log has something."""
    monkeypatch.setattr(watch, "_QUIET_S", 0.0)
    monkeypatch.setattr(job, "_FIRST_POLL_S", 0.02)
    running, completed = [status("RUNNING")], [status("COMPLETED")]
    _, lines = follow(tmp_path, [running, running, running, completed])
    assert [line.partition(":")[0] for line in lines] == ["job 12", "It has printed nothing yet", "job 12"]
    (tmp_path / "job.log").write_text("begins\n")
    _, lines = follow(tmp_path, [running, running, completed])
    assert lines == ["job 12: RUNNING", "begins", "job 12: COMPLETED"]


def test_a_wait_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each state once, from two seconds on; a short wait says nothing."""
    pending, running, completed = [status("PENDING", reason="Priority")], [status("RUNNING")], [status("COMPLETED")]
    for silent_s, said in ((2.0, ""), (0.0, f"PENDING ({of_waiting('Priority')})\nRUNNING\n")):
        monkeypatch.setattr(job, "_SILENT_S", silent_s)
        story = Story([pending, pending, running, running, completed])
        waiting = Job(id="12", run_dir=tmp_path, ranks=1, scheduler=story)  # type: ignore[arg-type]
        assert waiting.result() == 0
        assert capsys.readouterr().err.replace("Waiting for job 12: ", "") == said


def test_a_silent_controller_is_waited_for(tmp_path: Path) -> None:
    down = SlurmError("Running scontrol:", "Unable to contact slurm controller", "wait")
    outcome, lines = follow(tmp_path, [[status("RUNNING")], down, down, [status("COMPLETED")]])
    assert outcome == 0
    assert lines == [
        "job 12: RUNNING",
        "Slurm does not answer (Unable to contact slurm controller); the job continues. Trying again …",
        "Slurm answers again.",
        "job 12: COMPLETED",
    ]


def test_a_forgotten_job_is_not_waited_for(tmp_path: Path) -> None:
    gone = JobNotFoundError("Running scontrol:", "slurm_load_jobs error: Invalid job id specified", "x")
    outcome, lines = follow(tmp_path, [[status("RUNNING")], gone])
    assert outcome == 1
    assert lines[1] == "job 12: Slurm no longer knows it."


@pytest.mark.parametrize(("state", "outcome"), [("COMPLETED", 0), ("STOPPED", 1)])
def test_a_forgotten_job_ended_as_its_training_says(tmp_path: Path, state: str, outcome: int) -> None:
    (tmp_path / "starts.jsonl").write_text(json.dumps({"kind": "end", "state": state}) + "\n")
    (tmp_path / "task-0.log").write_text("last words")
    gone = JobNotFoundError("Running scontrol:", "slurm_load_jobs error: Invalid job id specified", "x")
    told, lines = follow(tmp_path, [gone])
    assert told == outcome
    assert lines[:2] == [
        f"job 12: Slurm no longer knows it. Its training ended as {state}, by its own records.",
        "last words",
    ]


def test_a_restart_is_told(tmp_path: Path) -> None:
    chapters = [[status("RUNNING")], [status("PENDING", reason="BeginTime")], [status("RUNNING", restarts=1)]]
    _, lines = follow(tmp_path, [*chapters, [status("COMPLETED")]])
    assert lines[1:3] == [f"job 12: PENDING ({of_waiting('BeginTime')})", "job 12: RUNNING, restart 1"]


def test_an_array_is_counted(tmp_path: Path) -> None:
    waiting = [status("RUNNING", array_task="0"), status("PENDING", array_task="1-2%1")]
    ended = [status("COMPLETED", array_task="0"), status("FAILED", array_task="1", exit_code=2)]
    ended.append(status("COMPLETED", array_task="2"))
    (tmp_path / "checkpoints").mkdir()
    outcome, lines = follow(tmp_path, [waiting, ended], ids=("12_0", "12_1", "12_2"))
    assert outcome == 2
    assert lines == [
        "array 12: 2 PENDING, 1 RUNNING",
        "array 12: 2 COMPLETED, 1 FAILED",
        "job 12_1: FAILED, exit status 2",
        f"  To resume: cluster-ddp submit --resume {tmp_path}",
    ]


def test_an_array_ends_with_its_best_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the states of its tasks are, if two can be compared."""
    monkeypatch.chdir(tmp_path)
    ended = [status("COMPLETED", array_task="0"), status("FAILED", array_task="1", exit_code=2)]
    folders = [make_run(tmp_path / f"fit-12/{at}", job=f"12_{at}", values={"lr": f"0.{at}"}) for at in range(2)]
    write_lines(folders[1] / "metrics.jsonl", [{"kind": "val", "time": 1.0, "loss": 0.25}])
    shown: list[list[str]] = [[], []]
    for lines, loss in zip(shown, (math.nan, 0.5)):
        write_lines(folders[0] / "metrics.jsonl", [{"kind": "val", "time": 1.0, "loss": loss}])
        story = Story([ended])
        jobs = [
            Job(id=f"12_{at}", run_dir=folder, ranks=2, scheduler=story)  # type: ignore[arg-type]
            for at, folder in enumerate(folders)
        ]
        assert watch.follow(jobs, show=lines.append) == 2
    best = "Best: task 12_1 (lr=0.1): val loss 0.25. All tasks: cluster-ddp report fit-12"
    assert shown[1] == [*shown[0], best]
    assert shown[0] == ["array 12: 1 COMPLETED, 1 FAILED", "job 12_1: FAILED, exit status 2"]


@pytest.mark.parametrize("seen", [["RUNNING"], []], ids=["while it runs", "ended within seconds"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_training_that_runs_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool, seen: list[str]
) -> None:
    """But not what an earlier job has told of a run that this one resumes."""
    monkeypatch.setattr(job, "_FIRST_POLL_S", 0.05)
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "time": 90, "epoch": 2, "loss": 0.5}\n'
        '{"kind": "steps", "time": 40, "progress": 0.0}\n'  # of the start before
        '{"kind": "steps", "time": 100, "progress": 0.1}\n'
        '{"kind": "steps", "time": 160, "progress": 0.2, "samples_per_s": 1234.5}\n'
        '{"kind": "test", "time": 161, "accuracy": 0.9}\n{"kind": "st'
    )
    told_at = 4e9 if is_new else 1e9
    os.utime(tmp_path / "metrics.jsonl", (told_at, told_at))
    (tmp_path / "starts.jsonl").write_text('{"kind": "start", "time": 50}\n')
    use = '{"time": %d, "node": "n%d", "seconds": 10, "cpus": 4, "cpu": 0.5, "gpus": [{"utilization": %s}]}\n'
    (tmp_path / "usage-0.jsonl").write_text(use % (150, 1, 0.0) + use % (160, 1, 0.9))
    (tmp_path / "usage-1.jsonl").write_text(use % (158, 2, 0.7))
    (tmp_path / "usage-2.jsonl").write_text(use % (45, 2, 0.1))  # it was the third node of the start before
    shown: list[str] = []
    story = Story([[status(state)] for state in ["PENDING", *seen, "COMPLETED"]])
    one = Job(id="12", run_dir=tmp_path, ranks=2, scheduler=story)  # type: ignore[arg-type]
    watch.follow([one], show=lambda line: None, show_figures=shown.append)
    line = "epoch 2, 20 % done, 0:08:00 left, loss 0.5, accuracy 90.00 %, 1,234 samples/s, GPUs 80 % busy"
    assert shown == [line if is_new else "", ""]


def test_in_a_file_the_last_line_is_shown_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with watch.BottomLine() as bottom:
        for second in range(150):
            now[0] = float(second)
            bottom.update(f"at {second}")
            bottom.update("")
        bottom.show("log")
    assert capsys.readouterr().out == "at 0\nat 60\nat 120\nlog\n"
