"""What `make` says while it prepares: pip's progress on a terminal, and where MNIST comes from without internet."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from slowness import LIMIT_S, scaled

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))
import demo  # noqa: E402

# Stands in for a Python whose pip says how it was called.
PYTHON = """#!/bin/bash
[[ $1 == -m ]] || exit 0
mkdir -p "$3/bin"
printf '#!/bin/bash\\necho "$@" >%q\\n' "$3/pip-was-called" >"$3/bin/pip"
chmod +x "$3/bin/pip"
"""


def pip_words(tmp_path: Path, stdout: int) -> list[str]:
    """The words with which `make venv` calls pip."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "venv", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=stdout, stderr=subprocess.STDOUT, timeout=scaled(LIMIT_S))
    return (tmp_path / "venv" / "pip-was-called").read_text().split()


def test_on_a_terminal_pip_shows_how_far_it_is(tmp_path: Path) -> None:
    """Its bar is not shown with -q."""
    ours, theirs = pty.openpty()
    try:
        assert not {"-q", "-qq"} & set(pip_words(tmp_path, theirs))
    finally:
        os.close(ours)
        os.close(theirs)


def test_in_a_file_pip_is_quiet(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        assert "-qq" in pip_words(tmp_path, log.fileno())


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The demo, in a folder without data; nothing can be downloaded there."""
    monkeypatch.setattr(demo, "DATA_DIR", tmp_path / "data")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    return demo


def test_without_internet_the_demo_says_where_mnist_may_come_from(scripts: ModuleType, capsys) -> None:
    assert scripts._dataset("") == "digits"
    said = capsys.readouterr().out
    assert "make demo MNIST_FROM=FOLDER" in said
    assert "python scripts/download_data.py --from FOLDER" in said


def test_a_folder_without_mnist_is_named(scripts: ModuleType, tmp_path: Path, capsys) -> None:
    """Not passed over in silence: the user gave it."""
    assert scripts._dataset(str(tmp_path)) == "digits"
    assert f"from {tmp_path}:\n  neither train-images-idx3-ubyte nor" in capsys.readouterr().out


def test_without_slurms_commands_nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not demo._slurm_answers()
