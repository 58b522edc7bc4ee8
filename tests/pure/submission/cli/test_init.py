"""`cluster-ddp init`: a project's first settings, from what a cluster shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.cli import init
from cluster_ddp.submission.cli import settings_files

__all__ = ["fake_slurm"]

SINFO = """cat <<'X'
cpu*|up|idle|8|32|128000|infinite|(null)
gpu|up|idle|4|16|64000|1-00:00:00|gpu:a100:4
fat|up|idle|1|64|512000|1-00:00:00|gpu:a100:4,gpu:h100:4
old|down|idle|4|16|64000|1-00:00:00|gpu:2
X"""
ACCOUNTS = "printf 'physics|physics\\nphysics|ml\\n'"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "it's a project"
    path.mkdir()
    (path / "my train.py").write_text("print('trained')\n")
    monkeypatch.chdir(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fake_slurm.command("sinfo", SINFO)
    fake_slurm.command("sacctmgr", ACCOUNTS)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = init.main(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    return status, *capsys.readouterr()


def values() -> dict[str, object]:
    return dict(settings_files.load(None, folder=Path.cwd(), env={}).values)


def test_what_the_cluster_has_is_written_and_explained(capsys, folder: Path) -> None:
    status, out, err = run(capsys, "--yes")
    assert (status, err) == (0, "")
    assert out == (
        "Written: cluster.toml\n"
        "Next:\n"
        "  cluster-ddp submit --dry-run -- python my_train.py    # shows the job\n"
        "  cluster-ddp submit --watch -- python my_train.py      # submits it and follows it\n"
        "  cluster-ddp status                                    # shows how far your jobs are\n"
    )
    assert values() == {"partition": "gpu", "account": "physics", "time": "0-01:00:00"}
    text = (folder / "cluster.toml").read_text()
    assert "#   cpu (default): 8 nodes with no GPUs, 32 CPUs, 125G of memory; no time limit\n" in text
    assert "#   fat: 1 node with 4 a100 and 4 h100, 64 CPUs, 500G of memory; at most 1-00:00:00\n" in text
    assert "# Your accounts: physics, ml.\n" in text
    assert "A node here has 4.\n# gpus_per_node = 4\n# cpus_per_task = 4 " in text


def test_what_is_commented_out_is_valid_too(capsys, folder: Path) -> None:
    assert run(capsys, "--partition", "fat", "--account", "ml")[0] == 0
    lines = (folder / "cluster.toml").read_text().splitlines()
    keys = [line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in lines]
    (folder / "cluster.toml").write_text("\n".join(line for line in keys if not line.startswith("#")))
    assert values() == {
        "partition": "fat",
        "account": "ml",
        "gpus_per_node": 8,
        "gpu_type": "a100",
        "cpus_per_task": 8,
        "time": "0-01:00:00",
        "modules": ("cuda/12.8",),
    }


def test_the_modules_that_a_login_shell_shows(capsys, folder: Path, tmp_path: Path) -> None:
    """Lmod lists folders as well; Environment Modules mark the default."""
    listed = "/opt/modules:\\ncuda/\\ncuda/12.8(default)\\ngcc/13\\npytorch/2.10\\n"
    (tmp_path / ".bash_profile").write_text(f"module() {{ printf '{listed}' >&2; }}\n")
    assert run(capsys, "--yes")[0] == 0
    assert '# modules = ["cuda/12.8", "pytorch/2.10"]' in (folder / "cluster.toml").read_text()


def test_a_script_gets_its_job(capsys, folder: Path) -> None:
    status, out, _ = run(capsys, "my train.py", "--yes")
    assert status == 0
    assert "Written: my train.sbatch, for `sbatch 'my train.sbatch'`.\n" in out
    assert "cluster-ddp submit --watch -- python 'my train.py'" in out
    script = (folder / "my train.sbatch").read_text()
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=physics"} <= set(script.splitlines())
    assert subprocess.run(["bash", "-n", "my train.sbatch"]).returncode == 0


@pytest.mark.parametrize("there", ["cluster.toml", "my train.sbatch"])
def test_nothing_is_overwritten(capsys, folder: Path, there: str) -> None:
    (folder / there).write_text("mine")
    status, _, err = run(capsys, "my train.py", "--yes")
    assert status == 2
    assert f"Writing {there}:\n  it exists already, and nothing is overwritten.\n  Hint: edit it" in err
    assert (folder / there).read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == sorted({"my train.py", there})


def test_a_choice_is_asked_for(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run(capsys)
    assert status == 2
    assert "there are cpu, gpu, fat, and nobody can be asked.\n  Hint: --partition gpu, or --yes for that one" in err
    answers = iter(["3", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    assert run(capsys)[0] == 0
    assert values() == {"partition": "fat", "account": "physics", "time": "0-01:00:00"}


def test_an_account_that_the_partition_does_not_name(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("scontrol", "echo 'PartitionName=gpu AllowAccounts=ml'")
    assert run(capsys, "--yes")[2] == ""
    assert values()["account"] == "ml"
    Path("cluster.toml").unlink()
    warned = "warning: The partition gpu does not name the account physics. It names ml.\n"
    assert run(capsys, "--yes", "--account", "physics")[2] == warned
    assert values()["account"] == "physics"


def test_a_wrong_name_is_an_error(capsys, folder: Path) -> None:
    _, _, err = run(capsys, "--partition", "gpus")
    assert "Using the partition gpus:\n  there are cpu, gpu, fat. Did you mean gpu?" in err
    _, _, err = run(capsys, "--partition", "gpu", "--account", "chemistry")
    assert "Using the account chemistry:\n  there are physics, ml." in err
    _, _, err = run(capsys, "no.py")
    assert "there is no such file in" in err
    assert [path.name for path in folder.iterdir()] == ["my train.py"]


def test_without_accounting_or_without_slurm(capsys, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("sacctmgr", "echo 'You are not running a supported accounting_storage plugin' >&2; exit 1")
    assert run(capsys, "--yes")[0] == 0
    assert values() == {"partition": "gpu", "time": "0-01:00:00"}
    Path("cluster.toml").unlink()
    fake_slurm.command("sinfo", "echo 'sinfo: error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    status, out, _ = run(capsys)
    assert status == 0
    assert out.startswith(
        "Slurm does not answer here: sinfo: error: Unable to contact slurm controller (connect failure) "
        "cluster.toml gets no partition. Hint: check that the controller is up: scontrol ping\n"
    )
    assert values() == {"time": "0-01:00:00"}
    Path("cluster.toml").unlink()
    (fake_slurm.folder / "sinfo").unlink()
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:{Path(sys.executable).parent}")
    status, out, _ = run(capsys)
    assert status == 0
    assert "There is no Slurm here (no sinfo on the PATH)" in out
    assert values() == {"time": "0-01:00:00"}
