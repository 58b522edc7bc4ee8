"""How far submitted jobs are: run folders as a submission makes them, Slurm as a stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp import status
from cluster_ddp.launch import planning, submission
from cluster_ddp.launch.spec import JobSpec

__all__ = ["fake_slurm"]

RECORD = "JobId={id} {array}JobState={state} Reason={reason} RunTime=00:01:30 Restarts={restarts} ExitCode=0:0 StdOut=x"


def record(id: int, state: str = "RUNNING", *, reason: str = "None", restarts: int = 0, task: str = "") -> str:
    array = f"ArrayJobId=12 ArrayTaskId={task} " if task else ""
    return RECORD.format(id=id, state=state, reason=reason, restarts=restarts, array=array)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "it's a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def submit(name: str = "fit", **fields) -> Path:
    spec = JobSpec(name=name, command=("true",), **fields)
    return submission.submit(planning.plan(spec, backend="sbatch"))[0].run_dir


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[str]]:
    assert status.main(argv) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["JOB", "NAME", "STATE", "ELAPSED", "RESTARTS", "EPOCH", "ACCURACY", "SAMPLES/S"]
    return [line.split() for line in lines if not line.startswith("To resume job ")]


def slurm_says(fake_slurm: FakeSlurm, *records: str) -> None:
    fake_slurm.command("scontrol", "cat <<'X'\n" + "\n".join(records) + "\nX")


def test_the_last_figures_are_shown(capsys, fake_slurm: FakeSlurm) -> None:
    lines = [
        {"kind": "train", "epoch": 1, "samples_per_s": 10.0},
        {"kind": "test", "epoch": 1, "accuracy": 0.5},
        {"kind": "train", "epoch": 2, "samples_per_s": 1234.4},
        {"kind": "test", "epoch": 2, "accuracy": 0.98765},
        {"kind": "train", "epoch": 3, "samples_per_s": 1300.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra'
    (submit() / "metrics.jsonl").write_text(text)
    slurm_says(fake_slurm, record(12, restarts=2))
    assert rows(capsys) == [["12", "fit", "RUNNING", "00:01:30", "2", "3", "98.77", "%", "1300"]]


def test_what_is_not_known_is_left_out(capsys, fake_slurm: FakeSlurm) -> None:
    submit()
    slurm_says(fake_slurm, record(12, "PENDING", reason="Resources"))
    assert rows(capsys)[0][5:] == ["-", "-", "-", "(Resources)"]


def test_an_array_is_asked_for_once(capsys, fake_slurm: FakeSlurm) -> None:
    submit(array="0-3%2")
    slurm_says(fake_slurm, record(12, "PENDING", task="2-3%2"), record(13, task="0"), record(14, "FAILED", task="1"))
    calls = len(fake_slurm.calls("scontrol"))
    states = {"12_0": "RUNNING", "12_1": "FAILED", "12_2": "PENDING", "12_3": "PENDING"}
    assert {row[0]: row[2] for row in rows(capsys)} == states
    assert len(fake_slurm.calls("scontrol")) == calls + 1
    assert [row[0] for row in rows(capsys, "12_1")] == ["12_1"]
    assert len(rows(capsys, "12")) == len(rows(capsys, "runs/latest")) == 4
    assert [row[0] for row in rows(capsys, "runs/fit-12_3")] == ["12_3"]


def test_a_job_or_a_run_folder_can_be_named(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    submit()
    fake_slurm.command("sbatch", "echo 15")
    submit("other")
    slurm_says(fake_slurm, record(15))
    assert [row[0] for row in rows(capsys)] == ["12", "15"]
    assert [row[0] for row in rows(capsys, "15")] == ["15"]
    assert [row[0] for row in rows(capsys, "runs/latest", "runs/fit-12")] == ["15", "12"]
    assert [row[0] for row in rows(capsys, str(folder / "runs" / "fit-12"))] == ["12"]


def test_a_forgotten_job_is_looked_up_in_the_accounting(capsys, fake_slurm: FakeSlurm) -> None:
    submit()
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake_slurm.command("sacct", "echo '12|12|CANCELLED by 1000|0:15|01:00:00'")
    assert rows(capsys)[0][2:5] == ["CANCELLED", "01:00:00", "0"]


def test_without_accounting_the_run_folder_is_what_is_left(capsys, fake_slurm: FakeSlurm) -> None:
    run_dir = submit()
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake_slurm.command("sacct", "exit 1")
    assert rows(capsys)[0][2] == "unknown"
    (run_dir / "metrics.jsonl").write_text('{"kind": "done"}\n')
    assert rows(capsys)[0][2] == "COMPLETED"


def test_a_job_of_slurms_without_a_run_folder(capsys, fake_slurm: FakeSlurm) -> None:
    slurm_says(fake_slurm, record(99))
    assert rows(capsys, "99")[0][:3] == ["99", "-", "RUNNING"]


def test_a_job_that_nobody_knows(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(SystemExit) as raised:
        status.main(["99"])
    assert raised.value.code == 2
    assert "there is no run folder of it in runs, and Slurm says" in capsys.readouterr().err


def test_nothing_submitted_yet(capsys) -> None:
    assert status.main([]) == 0
    assert "No submitted jobs in runs" in capsys.readouterr().out


def test_damaged_run_folders_are_passed_over(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    submit()
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"job": 3}')):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "spec.json").write_text(text)
    slurm_says(fake_slurm, record(12))
    assert [row[0] for row in rows(capsys)] == ["12"]
