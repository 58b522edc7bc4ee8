"""A run directory that `launch --run-dir` was given is a run like any other, whatever its script is."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from cluster_ddp.errors import JobError, RunDirError
from cluster_ddp.jobs import find_runs, run_record
from cluster_ddp.run import job_file
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.runtime.run_dir.fenced_writes import RunLock
from cluster_ddp.slurm.topology import Topology


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
    assert find_runs.of_run(found, to_read=True).ranks == 1


def test_it_is_found_by_its_name(launched: Path) -> None:
    """As `status` shows it; a word that means nothing is not handed to Slurm."""
    for name in ("train", "train-23"):
        assert [one.run_dir for one in find_runs.find(name, launched.parent)] == [launched]
    with pytest.raises(JobError, match=r"it is neither a job id nor a run directory, and no run in .* has this name"):
        find_runs.find("trian", launched.parent)
    assert find_runs.find("99", launched.parent) == []  # Slurm may know it


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


@pytest.mark.parametrize("name", ["run.json", ".lock"])
@pytest.mark.parametrize(
    "variables",
    [
        {"CLUSTER_DDP_LOCAL_JOB_ID": "10791"},  # launch --ranks 1
        {"CLUSTER_DDP_LOCAL_JOB_ID": "10791", "TORCHELASTIC_RUN_ID": "10791.0"},  # its command is a torchrun
        {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "10791"},
    ],
    ids=["launch", "torchrun", "submitit"],
)
def test_a_training_on_this_machine_has_none_either(name: str, variables: dict[str, str], tmp_path: Path) -> None:
    """Without --run-dir, the training alone has written to it."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    submitit = {f"SUBMITIT_LOCAL_{name}": value for name, value in zip(("GLOBALID", "LOCALID", "NTASKS"), "001")}
    topology = Topology.from_environ({**ranks, **submitit, **variables})
    run_dir = tmp_path / "training-10791"
    run_dir.mkdir()
    lock = RunLock(run_dir / ".lock", topology)
    if name == "run.json":
        (run_dir / name).write_text(json.dumps({"topology": asdict(topology)}))
        (run_dir / ".lock").unlink()
    (found,) = find_runs.in_folder(tmp_path)
    assert (found.job, found.runs_on, found.name) == ("", None, "training-10791")
    assert find_runs.find("10791", tmp_path) == []
    os.close(lock._file)


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    assert find_runs.in_folder(tmp_path / "runs") == []
    with pytest.raises(RunDirError, match="it has no"):
        run_record.read(tmp_path / "runs" / "notes")
