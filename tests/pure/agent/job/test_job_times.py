"""When a job started and will end, with a squeue that stands in for Slurm's."""

from __future__ import annotations

import os

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent.job import job_times

__all__ = ["fake_slurm"]


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        ("1896087600 1896091200", (1896087600, 1896091200)),
        ("1896087600 NONE", None),
        ("N/A N/A", None),
        ("", None),
    ],
)
def test_the_times_of_the_job(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, answer: str, times: tuple[int, int] | None
) -> None:
    """In seconds of UNIX time, of this task alone; an answer at the third time is soon enough for a job's start."""
    fake_slurm.command("squeue", f'echo warning >&2; echo "{answer}"')
    assert job_times.parse_times(job_times.ask_times("70_3", os.environ)) == times
    assert fake_slurm.calls("squeue") == [["--noheader", "--format=%S %e", "--jobs=70_3"]]
    assert fake_slurm.env("squeue")["SLURM_TIME_FORMAT"] == "%s"

    monkeypatch.setattr(job_times, "RETRY_S", 0.01)
    asked = fake_slurm.folder / "asked"
    fake_slurm.command("squeue", f'echo >>"{asked}"; [[ $(wc -l <"{asked}") -eq 3 ]] || exit 1; echo "{answer}"')
    assert job_times.ask_times("70_3", os.environ, tries=3) == answer


def test_a_controller_that_is_away_does_not_say_the_times(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_times, "RETRY_S", 0.01)
    fake_slurm.command("squeue", "echo 1 2; exit 1")
    assert job_times.parse_times(job_times.ask_times("71", os.environ)) is None
    assert (job_times.ask_times("71", os.environ, tries=3), len(fake_slurm.calls("squeue"))) == ("", 4)
