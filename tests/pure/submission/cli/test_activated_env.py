"""Which environment a command runs in: the one that is activated, if cluster-ddp was installed in another."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled
from venvs import make_venv

OWN = sys.prefix


def submit(folder: Path, *words: str, dry: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Submit with the tests' Python, with no environment activated but that of `env`."""
    how = ["--gpus-per-node", "1", *(["--dry-run"] if dry else [])]
    command = [sys.executable, "-m", "cluster_ddp.submit", *how, *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """An environment that is not that of the tests."""
    make_venv(tmp_path / "it's other")
    return tmp_path / "it's other"


def active(prefix: Path, variable: str = "VIRTUAL_ENV") -> dict[str, str]:
    return {variable: str(prefix), "PATH": f"{prefix}/bin:/usr/bin:/bin"}


def sourced(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith(("source ", "conda "))]


COMMAND = ("--no-check", "--", "python", "-c", "pass")


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="these tests' Python is in no environment")
class TestChoice:
    def test_the_activated_one_is_used_and_the_other_named(self, other: Path) -> None:
        done = submit(other.parent, *COMMAND, **active(other))
        assert sourced(done.stdout) == [f"source {shlex.quote(f'{other}/bin/activate')}"]
        assert done.stderr == (
            f"warning: The job uses the activated environment {other}, not cluster-ddp's own environment, {OWN}."
            f" For that: --venv {OWN} (silence: --accept activated)\n"
        )
        silent = submit(other.parent, "--accept", "activated", *COMMAND, **active(other))
        assert (silent.stderr, sourced(silent.stdout)) == ("", sourced(done.stdout))

    def test_its_python_runs_the_command(self, other: Path) -> None:
        shows = ("--", "python", "-c", "import sys; print(sys.prefix)")
        done = submit(other.parent, "--local", "--watch", *shows, dry=False, **active(other))
        assert done.returncode == 0, done
        assert (other.parent / "runs" / "latest" / "task-0.log").read_text() == f"{other}\n"

    @pytest.mark.parametrize("words", [("--venv", OWN), ("--conda-env", "/x"), ("--container", "docker://x")])
    def test_one_that_is_named_is_used(self, other: Path, words: tuple[str, ...]) -> None:
        done = submit(other.parent, *words, *COMMAND, **active(other))
        assert done.returncode == 0 and done.stderr == ""
        assert str(other) not in done.stdout.replace(f"{other}/runs", "").replace(str(other.parent), "")

    def test_a_path_of_a_program_names_its_environment(self, other: Path) -> None:
        done = submit(other.parent, "--", sys.executable, "-c", "pass", **active(other))
        assert sourced(done.stdout) == [f"source {shlex.quote(f'{OWN}/bin/activate')}"]
        assert "activated" not in done.stderr

    @pytest.mark.parametrize("how", ["none", "own", "not on the PATH"])
    def test_else_that_of_cluster_ddp(self, other: Path, how: str) -> None:
        env = {"none": {}, "own": active(Path(OWN)), "not on the PATH": {"VIRTUAL_ENV": str(other)}}[how]
        done = submit(other.parent, *COMMAND, **env)
        assert (done.returncode, done.stderr) == (0, "")
        assert sourced(done.stdout) == [f"source {shlex.quote(f'{OWN}/bin/activate')}"]

    def test_a_function_needs_the_one_that_loads_it(self, other: Path) -> None:
        done = submit(other.parent, "--no-check", **active(other))
        assert (done.returncode, done.stderr) == (0, "")
        assert sourced(done.stdout) == [f"source {shlex.quote(f'{OWN}/bin/activate')}"]

    @pytest.mark.parametrize("case", ["named", "base", "no conda"])
    def test_of_conda(self, other: Path, case: str) -> None:
        (other / "conda-meta").mkdir()
        if case != "no conda":
            (other / "bin" / "conda").write_text("#!/bin/sh\necho base /opt/conda\n")
            (other / "bin" / "conda").chmod(0o755)
        env = active(other, "CONDA_PREFIX") | {"CONDA_DEFAULT_ENV": "base" if case == "base" else "mine"}
        done = submit(other.parent, *COMMAND, **env)
        assert done.returncode == 0, done.stderr
        if case == "named":
            assert "conda activate '" in done.stdout and f"{OWN}/bin/activate" not in done.stdout
            assert f"The job uses the activated environment {other}, not" in done.stderr
        else:
            assert sourced(done.stdout) == [f"source {shlex.quote(f'{OWN}/bin/activate')}"]
            hint = {"base": "--conda-env base", "no conda": f"--setup 'export PATH={other}/bin:$PATH'"}[case]
            assert f"The job uses cluster-ddp's own environment, {OWN}, not the activated" in done.stderr
            assert hint in done.stderr
