"""What a job says at its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("folder", "is_there"), [("a run", True), ("another", False)])
def test_a_submissions_log_is_in_the_run_directory(tmp_path: Path, folder: str, is_there: bool) -> None:
    for name in ("a run", "another"):
        (tmp_path / name).mkdir()
    ask = "import sys, pathlib; from cluster_ddp.agent.job import launch_job as job"
    ask += "; sys.exit(job._is_output_in(pathlib.Path(sys.argv[1])))"
    with (tmp_path / "a run" / "job.log").open("w") as log:
        done = subprocess.run([sys.executable, "-c", ask, str(tmp_path / folder)], stdout=log)
    assert done.returncode == is_there
