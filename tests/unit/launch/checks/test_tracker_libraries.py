"""A tracker whose library the job's Python lacks is refused before the submission."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.launch.backends import submit_env
from cluster_ddp.launch.checks import tracker_libraries
from cluster_ddp.launch.render import render, render_local
from cluster_ddp.launch.spec import JobSpec
from cluster_ddp.launch.task_command import of_command


def spec(*names: str, **more: str | None) -> JobSpec:
    return JobSpec(name="x", command=("true",), track=names, **more)  # type: ignore[arg-type]


def test_an_unknown_tracker_gets_the_legal_ones_and_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        spec("tensorbord")
    assert caught.value.found == "there is no such tracker. Did you mean tensorboard?"
    assert caught.value.hint == "the trackers are tensorboard, wandb, mlflow"


def test_a_library_that_is_missing_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker_libraries.check(spec("tensorboard", "wandb", "mlflow"))
    monkeypatch.setattr(tracker_libraries.importlib.util, "find_spec", lambda name: None)
    tracker_libraries.check(spec())
    for more in ({"venv": sys.prefix}, {"venv": None}):
        with pytest.raises(SpecError) as caught:
            tracker_libraries.check(spec("wandb", **more))
        assert caught.value.asked == "Tracking with wandb:"
        assert caught.value.found == f"there is no library 'wandb' in {sys.prefix}."
        assert caught.value.hint == "pip install 'cluster-ddp[wandb]'"
    tracker_libraries.check(spec("wandb", container="image.sif"))  # nobody knows


def test_the_jobs_own_environment_is_looked_at(tmp_path: Path) -> None:
    packages = tmp_path / "an env" / "lib" / "python3.12" / "site-packages"
    (packages / "wandb").mkdir(parents=True)
    (packages / "wandb" / "__init__.py").touch()
    tracker_libraries.check(spec("wandb", venv=str(tmp_path / "an env")))
    with pytest.raises(SpecError) as caught:
        tracker_libraries.check(spec("tensorboard", venv=str(tmp_path / "an env")))
    assert caught.value.hint == f"'{tmp_path}/an env'/bin/pip install 'cluster-ddp[tensorboard]'"


def test_the_names_get_to_the_ranks_and_only_by_the_option() -> None:
    job = spec("tensorboard", "wandb")
    scripts = (
        render(job, of_command(job), source="", run_prefix="/r/x-"),
        render_local(job, of_command(job), source=""),
    )
    for script in scripts:
        assert "\nexport CLUSTER_DDP_TRACK='tensorboard wandb'\n" in script
    assert "export CLUSTER_DDP_TRACK" not in render(spec(), of_command(spec()), source="", run_prefix="/r/x-")
    assert submit_env.clean({"CLUSTER_DDP_TRACK": "mlflow"}) == {}
