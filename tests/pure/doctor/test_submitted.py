"""The doctor as a job of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.doctor import __main__ as doctor

__all__ = ["fake_slurm"]


def test_the_doctors_job_is_not_restarted(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the job has, with whose options it is submitted."""
    (tmp_path / "it's a folder").mkdir()
    monkeypatch.chdir(tmp_path / "it's a folder")
    Path("cluster.toml").write_text("restarts = 3\nhang_restart_s = 30\nmem = '1G'\nmax_mem = '2G'\n")
    assert doctor.main(["--nodes", "2", "--spare-nodes", "1", "--no-check", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "\n#SBATCH --nodes=2\n" in out
    assert not any(option in out for option in ("--restarts=", "--spare-nodes=", "--hang-restart-s=", "--max-mem="))
