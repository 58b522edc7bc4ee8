"""A Python package that an option needs and the job's Python lacks is missed before the submission."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.agent.job import inherited_env
from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import job_environment
from cluster_ddp.submission.render import agent_options, render, render_local
from cluster_ddp.submission.spec import JobSpec


def spec(*names: str, **more: object) -> JobSpec:
    return JobSpec(name="x", command=("true",), track=names, **more)  # type: ignore[arg-type]


def command(*words: str, **more: str | bool) -> JobSpec:
    return JobSpec(name="x", command=words, **more)  # type: ignore[arg-type]


def test_an_unknown_tracker_gets_the_legal_ones_and_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        spec("tensorbord")
    assert caught.value.found == "track must be one of tensorboard, wandb, mlflow."
    assert caught.value.hint == "--track tensorboard"


def environment(tmp_path: Path, *packages: str) -> str:
    """A virtual environment without any package but these."""
    venv = tmp_path / "an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    for name in packages:
        (next(venv.glob("lib/python*/site-packages")) / f"{name}.py").touch()
    return str(venv)


def refused(job: JobSpec) -> SpecError:
    with pytest.raises(SpecError) as caught:
        job_environment.check_packages(job)
    return caught.value


def test_a_library_that_the_environment_lacks_is_refused(tmp_path: Path) -> None:
    job_environment.check_packages(spec("tensorboard", "wandb", "mlflow", venv=sys.prefix))
    venv = environment(tmp_path, "wandb")
    job_environment.check_packages(spec(venv=venv))
    job_environment.check_packages(spec("wandb", venv=venv))
    error = refused(spec("wandb", "mlflow", venv=venv))
    assert error.asked == "Tracking with mlflow:"
    assert error.found == f"there is no Python package 'mlflow' in {venv}."
    assert error.hint == f"'{venv}/bin/python' -m pip install 'cluster-ddp[mlflow]'"
    job_environment.check_packages(spec("mlflow", venv=venv, container="image.sif"))  # nobody knows
    job_environment.check_packages(spec("mlflow", venv=venv, modules=("python/3.12",)))


def test_a_launcher_needs_its_package_in_the_commands_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = f"{environment(tmp_path)}/bin/python"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster_ddp").mkdir()  # only a folder of that name
    error = refused(command(python, "-u", "train.py", launcher="fork"))
    assert error.asked == "Starting the ranks by --launcher fork:"
    assert error.found == f"there is no Python package 'cluster_ddp' in {tmp_path}/an env."
    assert error.hint == f"'{python}' -m pip install cluster-ddp; or leave it to srun: --launcher srun"
    assert refused(command(python, "train.py", doctor=True)).asked == "Running the doctor before the ranks:"
    job_environment.check_packages(command(python, "train.py"))
    paths = os.pathsep.join(path for path in sys.path if path)
    job_environment.check_packages(command("env", f"PYTHONPATH={paths}", python, "train.py", launcher="fork"))


def test_a_module_is_looked_for_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/inner").mkdir(parents=True)
    (tmp_path / "mine/__init__.py").write_text("raise SystemExit(1)")
    (tmp_path / "mine/inner/fit.py").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/other.py").touch()
    for words in (("-m", "mine.inner.fit"), ("-mjson.tool",), ("-m", "mine"), ("-m", "{which}")):
        job_environment.check_packages(command(sys.executable, *words))
    job_environment.check_packages(command("env", "PYTHONPATH=src", sys.executable, "-u", "-m", "other"))
    for module in ("mine.inner.nosuch", "mine.nosuch.fit", "other", "json.tool.nosuch"):
        error = refused(command(sys.executable, "-m", module))
        assert error.asked == f"Running {shlex.join([sys.executable, '-m', module])}:"
        assert error.found == f"there is no Python module {module!r} in {sys.prefix}."


def test_a_python_that_does_not_answer_is_left_to_other_checks() -> None:
    for python in ("no-such-folder/python", "/bin/false"):
        job_environment.check_packages(JobSpec(name="x", command=(python, "x.py"), doctor=True))


def test_the_names_get_to_the_ranks_and_only_by_the_option() -> None:
    job = spec("tensorboard", "wandb")
    for asked in (agent_options(job), agent_options(spec())):
        script, here = render(job, asked, source=""), render_local(job, asked, source="", code=None)
        said = [f"  --track={name} \\\n" in text for text in (script, here) for name in ("tensorboard", "wandb")]
        assert set(said) == {asked.track != ()}
    assert inherited_env.inherited({"CLUSTER_DDP_TRACK": "mlflow"}) == {}
