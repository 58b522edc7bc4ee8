"""The exit status of a process that ends at once, while its output can't be written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import sys; from cluster_ddp.runtime import process_exit; print('end'); process_exit."


@pytest.mark.parametrize(
    ("call", "status"), [("now(0)", 0), ("now(85)", 85), ("after(lambda: None)", 120), ("after(sys.exit)", 120)]
)
def test_only_a_program_that_ends_by_itself_has_pythons_status_of_lost_output(call: str, status: int) -> None:
    with open("/dev/full", "w") as full:
        env, quiet = {**os.environ, "PYTHONUNBUFFERED": ""}, subprocess.DEVNULL
        done = subprocess.run([sys.executable, "-c", PROGRAM + call], stdout=full, stderr=quiet, env=env)
    assert done.returncode == status
