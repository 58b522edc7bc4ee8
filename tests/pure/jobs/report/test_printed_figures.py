"""Figures that a command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_ddp.cli import report as verb
from cluster_ddp.errors import SpecError
from cluster_ddp.jobs.report import training_stats
from cluster_ddp.jobs.report.report_text import as_text
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import RunStatus

LOG = "epoch 1 loss 2.5, 1,200.5 images/s\nepoch 2 loss nan, many images/s\nepoch 3 loss 0.25, 1,300 images/s\n"


def test_each_group_is_a_figure(tmp_path: Path) -> None:
    (tmp_path / "task-0.log").write_text(LOG)
    (tmp_path / "job.log").write_text("loss 7\n")
    pattern = training_stats.compiled(r"loss (?P<loss>[\d.]+), (\S+) images/s")
    assert training_stats.printed(tmp_path, pattern) == {"loss": [2.5, 0.25], "2": [1200.5, 1300.0]}
    (tmp_path / "task-0.log").unlink()
    assert training_stats.printed(tmp_path, training_stats.compiled(r"loss (\d)")) == {"1": [7.0]}
    assert training_stats.printed(tmp_path, training_stats.compiled("nothing (.)")) == {}


def test_the_report_shows_the_first_and_the_last(tmp_path: Path) -> None:
    (tmp_path / "task-0.log").write_text(LOG)
    status = RunStatus(job="12", name="fit", state="RUNNING", run_dir=tmp_path)
    found = report(status, metric=training_stats.compiled(r"loss (?P<loss>[\d.]+)"))
    assert "\n  Printed, first … last (how many): loss 2.5 … 0.25 (2)\n" in as_text(found)


def test_a_loss_that_was_printed_as_nan_is_null_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task-0.log").write_text(LOG)
    status = RunStatus(job="12", name="fit", state="RUNNING", run_dir=tmp_path)
    monkeypatch.setattr(verb, "run_statuses", lambda runs_dir, jobs: [status])
    assert verb.main(["12", "--json", "--metric", r"loss (?P<loss>[\w.]+)"]) == 0
    said = capsys.readouterr().out
    assert "NaN" not in said and json.loads(said)[0]["printed"] == {"loss": [2.5, None, 0.25]}
    assert verb.main(["12", "--metric", r"loss (?P<loss>[\w.]+)"]) == 0
    assert "loss 2.5 … 0.25 (3)" in capsys.readouterr().out


@pytest.mark.parametrize(("pattern", "words"), [("loss", "it has no group"), ("(", r"unterminated subpattern")])
def test_what_finds_nothing_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        training_stats.compiled(pattern)
