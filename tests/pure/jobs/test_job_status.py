"""How far submitted jobs are: run directories as a submission makes them, Slurm as a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import wait_until
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.cli import report, status
from cluster_ddp.run import journal
from cluster_ddp.run.names import Then
from cluster_ddp.run.outcome import Failure, Outcome
from cluster_ddp.submission import planning, submit_plan
from cluster_ddp.submission.spec import JobSpec

__all__ = ["fake_slurm"]


def record(
    job: int,
    state: str = "RUNNING",
    *,
    reason: str = "None",
    restarts: int = 0,
    task: str = "N/A",
    status: int | str = 0,
) -> str:
    """A line of squeue's (22.05): columns side by side."""
    return f"{job:<12}{task:<64}{state:<20}{restarts:<10}{'1:30':<20}{reason:<200}{status:<12}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "it's a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def submit(name: str = "fit", **fields) -> Path:
    spec = JobSpec(name=name, command=("true",), **fields)
    return submit_plan.submit(planning.Plan(spec=spec))[0].run_dir


def table(capsys: pytest.CaptureFixture[str]) -> str:
    assert status.main([]) == 0
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    assert status.main(argv) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    counts = ["RESTARTS", "REQUEUES"]
    assert heading.split() == ["JOB", "NAME", "STATE", "ELAPSED", *counts, "EPOCH", "LOSS", "ACCURACY", "SAMPLES/S"]
    return [line.split() for line in lines if not line.startswith("To resume job ")]


def slurm_says(fake_slurm: FakeSlurm, *records: str) -> None:
    fake_slurm.command("squeue", "cat <<'X'\n" + "\n".join(records) + "\nX")


def test_the_last_figures_are_shown(capsys, fake_slurm: FakeSlurm) -> None:
    lines = [
        {"kind": "train", "epoch": 1, "samples_per_s": 10.0},
        {"kind": "test", "epoch": 1, "accuracy": 0.5},
        {"kind": "train", "epoch": 2, "samples_per_s": 1234.4},
        {"kind": "test", "epoch": 2, "loss": 0.043214, "accuracy": 0.98765},
        {"kind": "train", "epoch": 3, "samples_per_s": 1300.0, "accuracy": 1.0},
        {"kind": "train", "epoch": 3, "samples_per_s": 0.0},  # resumed at the end of an epoch
        {"kind": "memory", "gigabytes": 3},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra'
    (submit() / "metrics.jsonl").write_text(text)
    slurm_says(fake_slurm, record(12, restarts=2))
    assert rows(capsys) == [["12", "fit", "RUNNING", "00:01:30", "0", "2", "3", "0.04321", "98.77", "%", "1300"]]


def test_restarts_in_the_allocation_and_requeues_are_counted_apart(capsys, fake_slurm: FakeSlurm) -> None:
    then = ["restart", "requeue", "restart", "restart", "end", None, ["restart"]]
    end = {"event": "end", "job": "12", "state": "FAILED", "status": 1, "failed": {}}
    lines = [json.dumps({**end, "time": at, "start": at, "then": one}) for at, one in enumerate(then)]
    (submit() / "job.jsonl").write_text("\n".join([*lines, '{"event": "end", "then": "restart"}', '{"time": 9, "th']))
    slurm_says(fake_slurm, record(12, restarts=1))
    assert rows(capsys)[0][4:6] == ["3", "1"]
    assert status.main(["--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["restarts"], one["requeues"]) == (3, 1)


def test_what_is_not_known_is_left_out(capsys, fake_slurm: FakeSlurm) -> None:
    submit()
    slurm_says(fake_slurm, record(12, "PENDING", reason="Resources"))
    assert rows(capsys)[0][6:11] == ["-", "-", "-", "-", "(Resources:"]


@pytest.mark.parametrize(
    ("state", "marker", "log", "said"),
    [
        ("FAILED", "rank 1 on n2: ValueError: x", "", "rank 1 on n2: ValueError: x"),
        ("NODE_FAIL", "", "srun: error: Node failure on n2\n", "n2 is lost (node failure)"),
        ("NODE_FAIL", "rank 0 on n1: killed by SIGTERM", "", "a node of the job is lost (node failure)"),
        (
            "NODE_FAIL",
            "rank 0 on n1: it waits",
            "Node failure on n2",
            "rank 0 on n1: it waits; n2 is lost (node failure)",
        ),
        ("OUT_OF_MEMORY", "", "", "the kernel has killed a process for memory"),
        ("OUT_OF_MEMORY", "rank 0 on n1: E", "", "rank 0 on n1: E; the kernel has killed a process for memory"),
        (
            "OUT_OF_MEMORY",
            "rank 0 on n1: killed by the kernel for memory",
            "",
            "rank 0 on n1: killed by the kernel for memory",
        ),
    ],
)
def test_what_failed_first_is_said_in_words(
    capsys, fake_slurm: FakeSlurm, state: str, marker: str, log: str, said: str
) -> None:
    run_dir = submit()
    if marker:
        who, _, words = marker.partition(": ")
        journal.append_end(
            run_dir, Outcome("12", 0, "FAILED", 1, Failure(int(who.split()[1]), who.split()[3], 1, words)), shared=False
        )
    (run_dir / "job.log").write_text(log)
    slurm_says(fake_slurm, record(12, state))
    assert f"Job 12: failed first: {said}\n" in table(capsys)


FIRST = Failure(1, "n2", 1, "ValueError: x")


@pytest.mark.parametrize(
    ("state", "restarts", "ended", "is_said"),
    [
        ("FAILED", 0, Outcome("12", 0, "FAILED", 1, FIRST), True),
        ("FAILED", 0, Outcome("13", 0, "FAILED", 1, FIRST), False),  # another job's
        ("RUNNING", 1, Outcome("12", 0, "FAILED", 1, FIRST, then=Then.REQUEUE), False),
        ("PENDING", 1, Outcome("12", 0, "FAILED", 1, FIRST, then=Then.REQUEUE), True),  # why it waits again
        ("TIMEOUT", 1, Outcome("12", 0, "FAILED", 1, FIRST, then=Then.REQUEUE), False),  # the start after it
        ("CANCELLED", 2, Outcome("12", 1, "FAILED", 1, FIRST), False),  # requeued by hand
    ],
)
def test_only_the_failure_of_the_last_start_is_said(
    capsys, fake_slurm: FakeSlurm, state: str, restarts: int, ended: Outcome, is_said: bool
) -> None:
    journal.append_end(submit(), ended, shared=False)
    slurm_says(fake_slurm, record(12, state, restarts=restarts))
    assert status.main(["12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["failure"] == (FIRST.text if is_said else None)


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        (Outcome("12", 0, "FAILED", 1, FIRST, time=2.0), "FAILED"),
        (Outcome("12", 0, "TIMEOUT", 1, time=2.0), "TIMEOUT"),
        (Outcome("12", 0, "FAILED", 1, FIRST, time=0.5), "unknown"),  # of an earlier start
        (Outcome("12", 0, "STOPPED", 75, then=Then.REQUEUE, time=2.0), "unknown"),
    ],
)
def test_a_run_that_slurm_does_not_know_ended_as_its_agent_says(
    capsys, fake_slurm: FakeSlurm, ended: Outcome, state: str
) -> None:
    run_dir = submit()
    (run_dir / "starts.jsonl").write_text(json.dumps(START) + "\n")
    journal.append_end(run_dir, ended, shared=False)
    slurm_says(fake_slurm)
    fake_slurm.command("sacct", "exit 1")
    assert rows(capsys)[0][2] == state


def test_of_the_runs_that_have_failed_it_says_how_to_resume(capsys, fake_slurm: FakeSlurm) -> None:
    for job, name in ((12, "done"), (13, "lost"), (14, "works"), (15, "empty")):
        fake_slurm.command("sbatch", f"echo {job}")
        run_dir = submit(name)
        if name != "empty":
            (run_dir / "step-10.pt").touch()
    slurm_says(fake_slurm, record(12, "COMPLETED"), record(13, "FAILED"), record(14), record(15, "FAILED"))
    (hint,) = (line for line in table(capsys).splitlines() if "resume" in line)
    assert hint.startswith("To resume job 13: ") and "lost-" in hint


def test_an_array_is_asked_for_once(capsys, fake_slurm: FakeSlurm) -> None:
    submit(array="0-3%2")
    slurm_says(fake_slurm, record(12, "PENDING", task="2-3%2"), record(12, task="0"), record(12, "FAILED", task="1"))
    states = {"12_0": "RUNNING", "12_1": "FAILED", "12_2": "PENDING", "12_3": "PENDING"}
    assert {row[0]: row[2] for row in rows(capsys)} == states
    assert len(fake_slurm.calls("squeue")) == 1
    assert not fake_slurm.calls("sacct")
    assert [row[0] for row in rows(capsys, "12_1")] == ["12_1"]
    assert len(rows(capsys, "12")) == len(rows(capsys, "runs/fit-12")) == 4
    assert [row[0] for row in rows(capsys, "runs/latest")] == ["12_0"]
    assert [row[0] for row in rows(capsys, "runs/fit-12/3")] == ["12_3"]


def test_a_job_or_a_run_dir_can_be_named(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    submit()
    fake_slurm.command("sbatch", "echo 15")
    submit("other")
    slurm_says(fake_slurm, record(15))
    assert [row[0] for row in rows(capsys)] == ["12", "15"]
    assert [row[0] for row in rows(capsys, "15")] == ["15"]
    assert [row[0] for row in rows(capsys, "runs/latest", "runs/fit-12")] == ["15", "12"]
    assert [row[0] for row in rows(capsys, str(folder / "runs" / "fit-12"))] == ["12"]


def test_forgotten_jobs_are_looked_up_in_the_accounting_all_at_once(capsys, fake_slurm: FakeSlurm) -> None:
    submit()
    fake_slurm.command("sbatch", "echo 15")
    submit(array="0-1")
    slurm_says(fake_slurm, record(99))
    remembered = [
        "12|12+0|CANCELLED by 1000|0:15|01:00:00|Unknown",
        "16|15_0|REQUEUED|0:0|00:00:03|Unknown",
        "16|15_0|PREEMPTED|0:0|00:00:04|Unknown",
        "16|15_0|COMPLETED|0:0|00:00:05|Unknown",
        "15|15_1|FAILED|3:0|00:00:06|Unknown",
    ]
    fake_slurm.command("sacct", "cat <<'X'\n" + "\n".join(remembered) + "\nX")
    states = {"12": ["CANCELLED", "01:00:00"], "15_0": ["COMPLETED", "00:00:05"], "15_1": ["FAILED", "00:00:06"]}
    assert {row[0]: row[2:4] for row in rows(capsys)} == states
    assert {row[0]: row[4:6] for row in rows(capsys)} == {"12": ["0", "0"], "15_0": ["0", "2"], "15_1": ["0", "0"]}
    assert len(fake_slurm.calls("squeue")) == 2
    assert [call[-1] for call in fake_slurm.calls("sacct")] == ["--jobs=12,15"] * 2


def test_a_training_that_logs_nothing_shows_its_newest_checkpoint(capsys, fake_slurm: FakeSlurm) -> None:
    run_dir = submit()
    slurm_says(fake_slurm)
    (run_dir / ".progress").write_text("step-00000120.pt\n")
    assert status.main(["--json", "12"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["saved_step"] == 120
    assert "(newest checkpoint: step 120)" in table(capsys)
    (run_dir / "metrics.jsonl").write_text('{"kind": "train", "epoch": 1}\n')
    assert "newest checkpoint" not in table(capsys)
    (run_dir / ".progress").write_text("../../step-1\x1b.pt")
    assert status.main(["--json", "12"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["saved_step"] is None


def test_weights_that_became_nan_are_noted(capsys, fake_slurm: FakeSlurm) -> None:
    """Of the last start only, and not once a later state was saved."""
    run_dir = submit()
    slurm_says(fake_slurm)
    start, found = {"kind": "start", "step": 0}, {"kind": "non_finite", "step": 40, "what": "NaN or Inf in model w"}
    for starts, saved, noted in (
        ([start, found, {"kind": "end", "why": "The training reached its end."}], 30, True),
        ([start, found, start], 30, False),
        ([start, found], 50, False),
        ([start, {**found, "step": "4\n0"}], 30, False),
    ):
        (run_dir / "starts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in starts))
        (run_dir / ".progress").write_text(f"step-{saved:08}.pt\n")
        words = "(warning: weights are NaN or Inf since step 40; last good checkpoint: step 30)"
        assert (words in table(capsys)) == noted
    assert status.main(["--json", "12"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["non_finite_step"] is None


def test_without_accounting_the_run_dir_is_what_is_left(capsys, fake_slurm: FakeSlurm) -> None:
    run_dir = submit()
    slurm_says(fake_slurm)
    fake_slurm.command("sacct", "exit 1")
    assert rows(capsys)[0][2] == "unknown"
    (run_dir / "metrics.jsonl").write_text('{"kind": "done"}\n')
    assert rows(capsys)[0][2] == "COMPLETED"


@pytest.mark.parametrize(
    ("state", "reason", "waited", "words"),
    [
        ("FAILED", "JobLaunchFailure", 4021, "its node could not open its output file"),
        ("FAILED", "RaisedSignal:53(Real-time_signal_19)", 53, "its node could not open its output file"),
        ("FAILED", "JobLaunchFailure", "0:53", "its node could not open its output file"),  # 26.05
        ("FAILED", "JobLaunchFailure", 9, ""),  # its script was killed
        ("FAILED", "JobLaunchFailure", "0:9", ""),
        ("FAILED", "JobLaunchFailure", 0, "Slurm could not start it on its nodes"),
        ("FAILED", "NonZeroExitCode", 512, ""),
        ("FAILED", "BadConstraints", 0, "no node can ever run it"),
        ("BOOT_FAIL", "None", 0, "a node did not start up. Submit it again, without that node: --exclude NODE"),
        ("COMPLETED", "None", 0, ""),
    ],
)
def test_a_silent_end_of_slurms_is_put_into_words(
    capsys, fake_slurm: FakeSlurm, state: str, reason: str, waited: int | str, words: str
) -> None:
    submit()
    slurm_says(fake_slurm, record(12, state, reason=reason, status=waited))
    assert status.main(["12", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["end"] or "").startswith(words) and bool(one["end"]) == bool(words)
    assert (f"Job 12: {words}" in table(capsys)) == bool(words)


START = {"kind": "start", "time": 1.0, "restart": 0, "step": 0, "ranks": 1}


@pytest.mark.parametrize("submitted", [True, False])
@pytest.mark.parametrize(
    ("records", "state"),
    [
        ([START, {"kind": "end", "state": "COMPLETED"}], "COMPLETED"),
        ([START, {"kind": "end", "state": "STOPPED"}], "STOPPED"),
        ([START, {"kind": "end", "state": "STOPPED"}, {"kind": "non_finite", "step": 3}], "STOPPED"),
        ([START, {"kind": "end", "state": "COMPLETED"}, {"kind": "end", "state": "STOPPED"}], "STOPPED"),
        ([START, {"kind": "end", "state": "STOPPED"}, START], "unknown"),
        ([START, {"kind": "end", "state": "evil"}], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_run_that_slurm_does_not_know_ended_as_its_records_say(
    capsys, fake_slurm: FakeSlurm, folder: Path, records: list, state: str, submitted: bool
) -> None:
    run_dir = submit() if submitted else started(folder, "by-hand", run={"topology": {}})
    (run_dir / "starts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    slurm_says(fake_slurm)
    fake_slurm.command("sacct", "exit 1")
    assert rows(capsys)[0][2] == state


def test_what_slurm_knows_counts_before_the_records(capsys, fake_slurm: FakeSlurm) -> None:
    (submit() / "starts.jsonl").write_text('{"kind": "end", "state": "COMPLETED"}\n')
    slurm_says(fake_slurm, record(12, "TIMEOUT"))
    assert rows(capsys)[0][2] == "TIMEOUT"


def test_a_job_of_slurms_without_a_run_dir(capsys, fake_slurm: FakeSlurm) -> None:
    shown = (
        "JobId=99 JobName=x UserId=u(1) JobState=RUNNING Reason=None RunTime=00:01:30 Restarts=0 ExitCode=0:0 StdOut=x"
    )
    fake_slurm.command("scontrol", f"echo '{shown}'")
    assert rows(capsys, "99")[0][:3] == ["99", "-", "RUNNING"]
    ended = shown.replace("RUNNING Reason=None", "FAILED Reason=JobLaunchFailure").replace("0:0", "0:53")
    fake_slurm.command("scontrol", f"echo '{ended}'")
    assert status.main(["99"]) == 0
    assert "Job 99: its node could not open its output file" in capsys.readouterr().out
    assert report.main(["99"]) == 0
    text = capsys.readouterr().out
    assert "  Ended: its node could not open its output file" in text and "None" not in text


def test_a_job_that_nobody_knows(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(SystemExit) as raised:
        status.main(["99"])
    assert raised.value.code == 2
    assert "Job 99:\n  no run directory found in runs. Slurm says:" in capsys.readouterr().err


def started(folder: Path, name: str, **files: object) -> Path:
    """A run directory that no submission made."""
    path = folder / "runs" / name
    path.mkdir(parents=True)
    for file, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / {"run": "run.json", "lock": ".lock", "metrics": "metrics.jsonl"}[file]).write_text(text)
    return path


def test_trainings_that_nobody_submitted_are_shown(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    """By sbatch with a script of jobs/, by torchrun, by hand."""
    started(folder, "mnist-31", run={"topology": {"job_id": 31, "array_task_id": None}})
    started(folder, "mnist-40_2", run={"topology": {"job_id": 42, "array_job_id": 40, "array_task_id": 2}})
    started(folder, "training-33", lock={"job": "33", "process": 7}, metrics='{"kind": "done"}')
    held = started(folder, "by-hand", lock={"job": None, "process": 8})
    slurm_says(fake_slurm, record(31), record(40, "PENDING", reason="Priority", task="2"))
    assert {row[0]: row[1:3] for row in rows(capsys)} == {
        "31": ["mnist", "RUNNING"],
        "40_2": ["mnist", "PENDING"],
        "33": ["training", "COMPLETED"],
        "-": ["by-hand", "unknown"],
    }
    assert [row[1] for row in rows(capsys, "31")] == ["mnist"]
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(held / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert [row[2] for row in rows(capsys, "runs/by-hand")] == ["RUNNING"]
        process.communicate(b"\n")
    assert [row[2] for row in rows(capsys, "runs/by-hand")] == ["unknown"]


def test_a_folder_that_is_no_run_directory(capsys, folder: Path) -> None:
    (folder / "data" / ".lock").parent.mkdir()
    (folder / "data" / ".lock").write_text("another program's")
    with pytest.raises(SystemExit):
        status.main(["data"])
    assert "Reading the run directory data:\n  it has no spec.json, run.json or .lock" in capsys.readouterr().err


def test_as_json_and_with_the_values_of_a_grid(capsys, fake_slurm: FakeSlurm) -> None:
    spec = JobSpec(name="fit", command=("t", "{lr}", "{seed}"), grid={"lr": ("0.1", "1"), "seed": ("a b",)})
    run_dirs = [job.run_dir for job in submit_plan.submit(planning.Plan(spec=spec))]
    slurm_says(fake_slurm, record(12, "PENDING", reason="AssocGrpGRES", task="0-1"))
    assert status.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("SAMPLES/S  VALUES")
    assert lines[2].endswith(
        "lr=1 seed=a b    (AssocGrpGRES: all jobs of your account together use as many GPUs as they may)"
    )
    assert status.main(["--json", "12_1"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["job"], one["state"], one["reason"], one["epoch"]) == ("12_1", "PENDING", "AssocGrpGRES", None)
    assert one["values"] == {"lr": "1", "seed": "a b"}
    assert Path(one["run_dir"]).resolve() == run_dirs[1]


def test_watching_ends_when_all_have_ended(capsys, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    submit()
    answers = f"[[ -e seen ]] && echo '{record(12, 'COMPLETED')}' || echo '{record(12)}'; touch seen"
    fake_slurm.command("squeue", answers)
    monkeypatch.setattr(status, "_WATCH_S", 0.0)
    assert status.main(["--watch"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == [
        "STATE",
        "RUNNING",
        "STATE",
        "COMPLETED",
    ]


def test_states_have_colours_on_a_terminal_only(capsys, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    submit()
    slurm_says(fake_slurm, record(12))
    assert "\x1b" not in "".join(map("".join, rows(capsys)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert rows(capsys)[0][2] == "\x1b[36mRUNNING\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert rows(capsys)[0][2] == "RUNNING"


def test_nothing_submitted_yet(capsys) -> None:
    assert status.main([]) == 0
    assert "No runs in runs" in capsys.readouterr().out


SPEC = {"job": "13", "cluster": None, "submitted": 1.0, "spec": {"name": "bad", "array": None}}
DAMAGED_SPECS = [
    "{",
    "[]",
    '{"job": 3}',
    "[" * 100_000,
    json.dumps({**SPEC, "spec": {}}),
    json.dumps({**SPEC, "spec": {"name": 3}}),
    json.dumps({**SPEC, "spec": None}),
    json.dumps({**SPEC, "cluster": ["far"]}),
    json.dumps({**SPEC, "job": "../../etc"}),
    json.dumps({**SPEC, "job": "9" * 5000}),
    json.dumps({**SPEC, "submitted": "yesterday"}),
    json.dumps({**SPEC, "submitted": 10**400}),
]


def test_each_damaged_run_directory_is_a_row_that_says_why(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    submit()
    for number, text in enumerate(DAMAGED_SPECS):
        (folder / "runs" / f"bad-{number}").mkdir()
        (folder / "runs" / f"bad-{number}" / "spec.json").write_text(text)
    (folder / "runs" / "pipe").mkdir()
    os.mkfifo(folder / "runs" / "pipe" / "spec.json")
    (folder / "runs" / "bytes").mkdir()
    (folder / "runs" / "bytes" / "spec.json").write_bytes(b"\xff")
    slurm_says(fake_slurm, record(12))
    found = {row[1]: " ".join(row) for row in rows(capsys)}
    assert found.keys() == {"fit", "pipe", "bytes", *(f"bad-{number}" for number in range(len(DAMAGED_SPECS)))}
    assert found.pop("fit").startswith("12 fit RUNNING")
    assert all(" unknown " in row and "(spec.json can't be read: " in row for row in found.values())
    assert found["pipe"].endswith("(spec.json can't be read: it is not a regular file)")
    assert found["bad-3"].endswith("(spec.json can't be read: it is nested too deeply)")


def test_unreadable_metrics_are_said(capsys, fake_slurm: FakeSlurm) -> None:
    os.mkfifo(submit() / "metrics.jsonl")
    slurm_says(fake_slurm, record(12))
    assert table(capsys).splitlines()[1].endswith("(metrics.jsonl can't be read: it is not a regular file)")


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "epoch": "one", "samples_per_s": "many"}\n{"kind": "test", "accuracy": [1]}',
        '{"kind": "train", "epoch": NaN, "samples_per_s": Infinity}\n{"kind": "test", "accuracy": NaN}',
        '{"kind": "train", "epoch": null, "samples_per_s": null}\n{"kind": "test", "accuracy": null, "loss": null}',
        f'{{"kind": "train", "epoch": 1{"0" * 400}, "samples_per_s": 1{"0" * 400}}}',
        '{"kind": ["train"], "epoch": [3]}',
        "[" * 50_000,
        "\x1b[2J\xff",
    ],
)
def test_metrics_that_are_none_are_left_out(capsys, fake_slurm: FakeSlurm, line: str) -> None:
    (submit() / "metrics.jsonl").write_text(line + "\n", encoding="latin-1")
    slurm_says(fake_slurm, record(12))
    assert rows(capsys)[0][6:] == ["-", "-", "-", "-"]


def test_what_others_wrote_moves_no_cursor_and_no_column(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    for job, name in (("13", "\x1b]0;title\x07\r\n\u202eevil"), ("14", "x" * 10_000)):
        (folder / "runs" / job).mkdir(parents=True)
        description = {**SPEC, "job": job, "spec": {"name": name, "array": None}}
        (folder / "runs" / job / "spec.json").write_text(json.dumps(description))
        (folder / "runs" / job / "job.sbatch").touch()
    slurm_says(fake_slurm, record(13, "PENDING", reason="\x1b[31mred"), record(14))
    assert status.main([]) == 0
    said = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in said)
    assert "13   ?]0;title????evil" in said and "(?[31mred)" in said
    assert max(map(len, said.splitlines())) < 300


def test_jobs_here_and_on_slurm_with_the_same_id_are_both_shown(capsys, folder: Path) -> None:
    for name, script in (("here", "job.sh"), ("there", "job.sbatch")):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / script).touch()
        (folder / "runs" / name / "spec.json").write_text(json.dumps({**SPEC, "job": "13"}))
    assert [row[0] for row in rows(capsys)] == ["13", "13"]


def test_a_job_on_this_machine_whose_end_is_damaged_has_failed(capsys, folder: Path) -> None:
    for job, text in (
        ("13", "{"),
        ("14", '{"event": "end", "time": 1, "job": "14", "state": "COMPLETED"}'),
        ("15", "[]"),
    ):
        (folder / "runs" / job).mkdir(parents=True)
        (folder / "runs" / job / "spec.json").write_text(json.dumps({**SPEC, "job": job}))
        (folder / "runs" / job / "job.jsonl").write_text(text)
    assert [row[2] for row in rows(capsys)] == ["FAILED"] * 3


def test_ctrl_c_while_slurm_does_not_answer_is_no_traceback(fake_slurm: FakeSlurm) -> None:
    submit()
    fake_slurm.command("squeue", 'echo $$ >"$0.pid"; exec sleep 600')
    command = [sys.executable, "-m", "cluster_ddp", "status"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        pid = fake_slurm.folder / "squeue.pid"
        wait_until(lambda: process.poll() is not None or (pid.exists() and pid.read_text()))
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    assert (process.returncode, complaint) == (130, "")
