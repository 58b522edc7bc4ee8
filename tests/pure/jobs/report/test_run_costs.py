"""The sums over the runs of a folder: `cluster-ddp report runs/`, and where else the cost of a run is shown."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from made_runs import write_lines
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.cli import report, status
from cluster_ddp.jobs import watch
from cluster_ddp.jobs.report import cost
from cluster_ddp.submission.backends.slurm import Slurm
from cluster_ddp.submission.job import Job

__all__ = ["fake_slurm"]
DAY = 24 * 3600


def at(day: str) -> float:
    return time.mktime(time.strptime(day, "%Y-%m-%d"))


def make(runs: Path, job: int, day: str, *, gpus: int | None = 4, joules: float | None = None) -> Path:
    """A job of two hours on a node. Its training had one and a half. It was submitted at a day's noon."""
    run_dir, began = runs / f"fit-{job}", at(day) + DAY / 2
    run_dir.mkdir(parents=True)
    spec = {"name": "fit", "nodes": 1, "gpus_per_node": 4, "gpus_per_task": 1}
    (run_dir / "spec.json").write_text(json.dumps({"spec": spec, "job": str(job), "submitted": began}))
    start = {"event": "start", "job": str(job), "requeue": 0, "start": 0, "nodes": 1, "training": 1, "gpus": gpus}
    start["id"] = 70
    end = {"event": "end", "time": began + 7200, "job": str(job), "start": 0, "state": "COMPLETED", "status": 0}
    write_lines(run_dir / "job.jsonl", [{**start, "time": began}, end, {**end, "event": "over"}])
    write_lines(
        run_dir / "starts.jsonl",
        [{**start, "kind": "start", "time": began + 1800, "restart": 0, "start_id": 70, "step": 0, "ranks": 4}],
    )
    write_lines(
        run_dir / "metrics.jsonl", [{"kind": "steps", "steps": 900, "step_s": 1, "checkpoint_s": 0.2}, {"kind": "done"}]
    )
    (run_dir / "job.sbatch").touch()
    if joules is not None:
        gpu = {"energy_j": joules}
        use = {"node": "n1", "time": began, "seconds": 10, "cpus": 8, "cpu": 0.5, "gpus": [gpu]}
        write_lines(run_dir / "usage-0.jsonl", [use])
    return run_dir


@pytest.fixture
def runs(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: the second one is of a job without GPUs, the third one has its energy."""
    fake_slurm.command("squeue", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    folder = tmp_path / "my runs"
    make(folder, 7, "2026-10-31")
    make(folder, 8, "2026-11-01", gpus=None)
    make(folder, 9, "2026-11-02", joules=7.2e6)
    return folder


def test_a_line_for_each_run_and_the_sums(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 GPU hours each: 2 went by before the training began, and 180 s in saves (0.2 GPU hours)."""
    assert report.main([str(runs)]) == 0
    assert [re.split("  +", line) for line in capsys.readouterr().out.splitlines()] == [
        ["RUN", "STATE", "SUBMITTED", "GPU HOURS", "KEPT", "LOST", "KWH", "MOST LOST"],
        ["fit-7", "COMPLETED", "2026-10-31", "8", "5.8", "2.2", "-", "before the training began"],
        ["fit-8", "COMPLETED", "2026-11-01", "-", "-", "-", "-"],
        ["fit-9", "COMPLETED", "2026-11-02", "8", "5.8", "2.2", "2", "before the training began"],
        ["sum of 3", "16", "11.6", "4.4", "2"],
        ["known of", "2", "2", "2", "1"],
    ]


def test_since_a_day(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.main([str(runs), "--since", "2026-11-01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["job"] for one in told["runs"]] == ["8", "9"] and told["sum"]["gpu_hours"] == 8
    assert told["sum"]["energy_kwh"] == told["runs"][1]["cost"]["energy_kwh"] == pytest.approx(2.0)
    assert told["known"] == dict.fromkeys(told["known"], 1) and "energy_kwh" in told["sum"]
    monkeypatch.setattr(cost, "_LINES", 1)
    assert report.main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "(without a line: 2 earlier runs)" and [line.split()[0] for line in lines[2:4]] == [
        "fit-9",
        "sum",
    ]


@pytest.mark.parametrize(
    ("words", "found", "hint"),
    [
        (["my runs", "--since", "1.11.2026"], "it is not a day.", "--since 2026-11-01"),
        (["my runs", "--since", "2026-13-01"], "it is not a day.", "--since 2026-11-01"),
        (["my runs", "--since", "2026-12-01"], "the newest of its 3 runs is from 2026-11-02.", "an earlier day"),
        (["empty"], "it has no runs.", "such as runs/"),
        (["my runs/fit-9", "--since", "2026-11-01"], "--since takes one folder of runs.", "report runs/ --since 2026"),
        (["7", "--since", "2026-11-01"], "--since takes one folder of runs.", "report runs/ --since 2026-11-01"),
        (["my runs", "--html", "x.html"], "--html and --metric are for single runs.", "12 13 --html FILE"),
    ],
)
def test_what_can_not_be_added_up(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], found: str, hint: str
) -> None:
    Path("empty").mkdir()
    with pytest.raises(SystemExit):
        report.main(words)
    said = capsys.readouterr().err
    assert found in said and hint in said.partition("Hint: ")[2]


def test_status_as_json_has_it_too_and_the_last_line_of_watch(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status.main(["--runs-dir", str(runs), "--json"]) == 0
    seventh, _, ninth = (one["cost"] for one in json.loads(capsys.readouterr().out))
    assert (seventh["kept_gpu_hours"], seventh["energy_kwh"]) == (pytest.approx(5.8), None)
    assert ninth["energy_kwh_by_node"] == {"n1": 2.0}
    monkeypatch.setattr(watch, "follow", lambda jobs, **options: 5)
    job = Job(id="9", run_dir=runs / "fit-9", ranks=4, cluster=None, scheduler=Slurm())
    assert watch.on_terminal([job], if_left="") == 5
    line = "Cost: 8 GPU hours, 5.8 kept (2.2 lost, most before the training began); 2 kWh of the GPUs alone"
    assert capsys.readouterr().out == f"{line}\n"


def test_the_last_line_of_watch_says_of_how_many_tasks_the_cost_is_known(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "follow", lambda jobs, **options: 0)
    write_lines(runs / "fit-7" / "starts.jsonl", [])  # a script without a Checkpointer: what was kept is not known
    jobs = [
        Job(id=name, run_dir=runs / f"fit-{name}", ranks=4, cluster=None, scheduler=Slurm())
        for name in ("7", "8", "9", "never-started")
    ]
    watch.on_terminal(jobs, if_left="")
    said = capsys.readouterr().out
    assert said == "Cost: 16 GPU hours. Known of 2 of 4 tasks\n"  # not the energy of one of them
