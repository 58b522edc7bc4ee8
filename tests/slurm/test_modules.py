"""`--modules` with the real Environment Modules, from a login shell and from one that does not know them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from cluster import Cluster, skip_without_slurm

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import prerequisites

pytestmark = pytest.mark.full


@pytest.fixture
def home(machine: None, tmp_path: Path) -> Path:
    """A home whose profile adds a folder with a module, and a project in it."""
    try:
        prerequisites.install(("modulecmd",), ("environment-modules",))
    except SandboxError as error:
        skip_without_slurm(error)
    home = tmp_path / "it's home"
    (home / "modules" / "cuda").mkdir(parents=True)
    (home / "modules" / "cuda" / "12.8").write_text("#%Module\nsetenv CUDA_SEEN 12.8\n")
    (home / ".bash_profile").write_text(f"module use {shlex.quote(str(home / 'modules'))}\n")
    return home


def submitted(slurm: Cluster, home: Path, *bash: str, modules: str = "cuda/12.8") -> tuple[int, str]:
    """Submit a job that loads modules, from a kind of shell; how it ended, and what it and the submission printed."""
    words = ("submit", "--watch", "--modules", modules, "--", "bash", "-c", 'echo "seen: $CUDA_SEEN"')
    line = shlex.join([sys.executable, "-m", "cluster_ddp", *words])
    unset = ("env", "-u", "BASH_ENV", "-u", "MODULEPATH", "-u", "BASH_FUNC_module%%", f"HOME={home}")
    done = slurm.run(*unset, "bash", *bash, f"{line} 2>&1", cwd=home)
    return done.returncode, done.stdout


@pytest.mark.parametrize("bash", [("-lc",), ("-c",)], ids=["login shell", "other shell"])
def test_a_job_loads_the_modules_that_a_login_shell_knows(slurm: Cluster, home: Path, bash: tuple[str, ...]) -> None:
    """Cron, an editor's terminal or a notebook start shells that have no `module`."""
    status, said = submitted(slurm, home, *bash)
    assert (status, "seen: 12.8\n" in said) == (0, True), said


def test_a_module_that_is_not_there_is_refused(slurm: Cluster, home: Path) -> None:
    status, said = submitted(slurm, home, "-c", modules="cuda/99")
    assert status == 2
    assert "Loading the modules cuda/99:\n" in said and "Unable to locate a modulefile for 'cuda/99'" in said
    assert not (home / "runs").exists()


def test_init_writes_what_there_is(slurm: Cluster, home: Path) -> None:
    done = slurm.run("env", f"HOME={home}", sys.executable, "-m", "cluster_ddp", "init", "--yes", cwd=home)
    assert done.returncode == 0, done.stderr
    assert '# modules = ["cuda/12.8"]' in (home / "cluster.toml").read_text()
