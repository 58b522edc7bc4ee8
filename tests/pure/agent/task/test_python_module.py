"""agent.python_module: the working folder has no part in what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.agent.task import python_module

OWN = "def main():\n    import sys, json\n    print(sys.argv[1:], sys.path[0])\n    return 3\n"


@pytest.mark.parametrize(("runs_program", "status", "first"), [(False, 3, False), (True, 0, True)])
def test_a_module_of_the_working_folder_is_not_pythons(
    tmp_path: Path, runs_program: bool, status: int, first: bool
) -> None:
    """A program that runs in the same process has the folder nevertheless."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/own.py").write_text("import json\n" + OWN)
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working folder')")
    command = [sys.executable, *python_module.words("own", runs_program=runs_program), "--a", "it's b"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "modules")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    path = "" if first else str(tmp_path / "modules")
    assert (done.returncode, done.stdout, done.stderr) == (status, f"['--a', \"it's b\"] {path}\n", "")


def test_a_nodes_doctor_is_not_the_working_folders(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working folder')")
    command = [*python_module.doctor([sys.executable, "train.py"]), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage: cluster-ddp doctor" in done.stdout, done.stderr
