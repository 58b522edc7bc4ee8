from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster_ddp.errors import RunDirError
from cluster_ddp.submission.frozen import code_snapshot


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "it's a checkout"
    for name in ("tracked.py", "deleted.py", "sub dir/train.py", ".gitignore", "data/big.bin", "sub dir/cache/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("data/\ncache/\nruns/\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.py").symlink_to("tracked.py")
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    (root / "untracked ü.py").write_text("new")
    (root / "tracked.py").write_text("changed")
    (root / "deleted.py").unlink()
    return root


def test_it_holds_the_code_as_it_is_now(checkout: Path) -> None:
    run_dir = checkout / "runs" / "x-1"
    run_dir.mkdir(parents=True)
    code_snapshot.take(checkout / "sub dir", run_dir)
    copy = run_dir / "code"
    (checkout / "tracked.py").write_text("later")
    assert (copy / "tracked.py").read_text() == "changed"
    assert (copy / "link.py").resolve() == copy / "tracked.py"
    assert (copy / "untracked ü.py").read_text() == "new"
    assert (copy / "sub dir" / "train.py").read_text() == "sub dir/train.py"
    assert (copy / "run.sh").stat().st_mode & 0o111
    assert not (copy / "deleted.py").exists()
    assert not (copy / "sub dir" / "cache").exists()
    assert not (copy / ".git").exists()


def test_what_git_ignores_is_found_at_its_place(checkout: Path) -> None:
    run_dir = checkout / "runs" / "x-1"
    run_dir.mkdir(parents=True)
    code_snapshot.take(checkout, run_dir)
    assert (run_dir / "code" / "data").is_symlink()
    assert (run_dir / "code" / "data" / "big.bin").read_text() == "data/big.bin"


def test_the_job_runs_in_the_same_subfolder(checkout: Path) -> None:
    assert code_snapshot.subfolder(checkout) == "code"
    assert code_snapshot.subfolder(checkout / "sub dir") == "code/sub dir"


def test_it_needs_a_git_checkout(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a git repository"):
        code_snapshot.subfolder(tmp_path)
