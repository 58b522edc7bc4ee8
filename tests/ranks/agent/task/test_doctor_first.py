"""`--doctor` before the ranks, on this machine: its verdict is the job's first failure, under each launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from local_launch import launch


def launched(folder: Path, launcher: str, **env: str) -> tuple[int, str]:
    script = folder / "it's.py"
    script.write_text("print('trained', flush=True)\n")
    return launch(folder, "--launcher", launcher, "--doctor", "--", sys.executable, str(script), **env)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("fork", marks=pytest.mark.full)])
def test_the_ranks_start_if_the_doctor_finds_nothing(launcher: str, tmp_path: Path) -> None:
    """One examines the node, if something else than srun starts its ranks."""
    status, said = launched(tmp_path, launcher)
    assert (status, said.count("No problem found."), said.count("trained")) == (0, 1, 2), said
    assert f"cluster-ddp doctor: {'2 ranks' if launcher == 'srun' else '1 rank'} on " in said
    assert "Failed first" not in said


@pytest.mark.parametrize("launcher", ["srun", "fork"])
def test_a_verdict_is_what_failed_first(launcher: str, tmp_path: Path) -> None:
    status, said = launched(tmp_path, launcher, GLOO_SOCKET_IFNAME="ib0")
    assert (status, said.count("error: GLOO_SOCKET_IFNAME names an interface that is not there: ib0.")) == (2, 1), said
    assert re.search(r"^Failed first, with status 2: rank 0 on \S+: GLOO_SOCKET_IFNAME names", said, re.M), said
    assert "trained" not in said, said
