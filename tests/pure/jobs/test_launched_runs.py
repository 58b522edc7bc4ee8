"""A run directory that `launch --run-dir` was given is a run like any other, whatever its script is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.agent import job_file
from cluster_ddp.agent.job_file import JobFile
from cluster_ddp.errors import RunDirError
from cluster_ddp.jobs import find_runs, run_record


@pytest.fixture
def launched(tmp_path: Path) -> Path:
    """As the README's batch script leaves it with a script that does not use cluster_ddp."""
    run_dir = tmp_path / "runs" / "train-23"
    run_dir.mkdir(parents=True)
    job_file.complete(run_dir, JobFile("23", None, 100.0), shared=False)
    (run_dir / "task-0.log").write_text("hi\n")
    return run_dir


def test_it_is_found_by_its_folder_and_by_its_job(launched: Path) -> None:
    (found,) = find_runs.in_folder(launched.parent)
    assert (found.run_dir, found.job, found.name, found.runs_on) == (launched, "23", "train", "Slurm")
    assert [one.run_dir for one in find_runs.find("23", launched.parent)] == [launched]
    assert find_runs.of_run(found, to_read=True).tasks == 1


def test_the_next_job_in_it_has_it_then(launched: Path) -> None:
    job_file.complete(launched, JobFile("30", None, 200.0), shared=False)
    assert [one.job for one in find_runs.in_folder(launched.parent)] == ["30"]
    job_file.complete(launched, JobFile("30", None, 300.0), shared=False)  # requeued
    assert job_file.read(launched) == JobFile("30", None, 200.0)


def test_one_on_this_machine_has_no_id_of_slurms(launched: Path) -> None:
    """Its process id may be that of a job of Slurm, which was shown instead."""
    job_file.complete(launched, JobFile("10791", None, 200.0, "here", "boot 12"), shared=False)
    (found,) = find_runs.in_folder(launched.parent)
    assert (found.job, found.runs_on) == ("", None)
    assert find_runs.find("10791", launched.parent) == []


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    assert find_runs.in_folder(tmp_path / "runs") == []
    with pytest.raises(RunDirError, match="it has no"):
        run_record.read(tmp_path / "runs" / "notes")
