from __future__ import annotations

import os
from pathlib import Path

import pytest
from strangers import STRANGER, as_stranger, folder_of_all, needs_a_stranger

from cluster_ddp.submission.checks.job_warnings import of_shared_runs


@needs_a_stranger
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_who_can_replace_a_run_directory_is_warned_of(mode: int) -> None:
    with folder_of_all(mode) as runs:
        (runs / "train-12").mkdir(mode=0o700)
        can = as_stranger("mv", runs / "train-12", runs / "away").returncode == 0
        assert can == (mode == 0o777)
        advice = of_shared_runs(runs)
        assert [one.code for one in advice] == (["shared-runs"] if can else [])
        assert all(f"{runs} may be written by others: user root (0), mode 0777." in one.text for one in advice)
        assert all(one.text.endswith(f"chmod +t {runs}") for one in advice)
        os.chown(runs, STRANGER, STRANGER)  # who can rename, with the sticky bit, too
        assert f"{runs} belongs to user {STRANGER}, mode {mode:04o}." in of_shared_runs(runs)[0].text


def test_a_folder_that_will_be_made_is_ours(tmp_path: Path) -> None:
    assert of_shared_runs(tmp_path / "runs") == []
