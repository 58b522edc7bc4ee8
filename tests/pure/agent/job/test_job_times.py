"""When a job started and will end, with a squeue that stands in for Slurm's."""

from __future__ import annotations

import os

import pytest
from stand_ins import FakeSlurm, fake_slurm

from cluster_ddp.agent.job import slurm_commands

__all__ = ["fake_slurm"]
BATCH = {"ENVIRONMENT": "BATCH", "SLURM_JOB_START_TIME": "1896087600"}


@pytest.mark.parametrize(
    ("changes", "began_s"),
    [
        ({}, 1896087600.0),
        ({"SLURM_STEP_ID": "-5"}, 1896087600.0),  # 26.05, in the batch script
        ({"SLURM_STEP_ID": "3"}, None),  # a step of a job may begin hours after it
        ({"ENVIRONMENT": ""}, None),  # salloc
        ({"SLURM_JOB_START_TIME": "N/A"}, None),
    ],
)
def test_when_the_allocation_of_a_batch_script_began(changes: dict[str, str], began_s: float | None) -> None:
    assert slurm_commands.began_s({**BATCH, **changes}) == began_s


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
    assert slurm_commands.parse_times(slurm_commands.ask_times("70_3", os.environ)) == times
    assert fake_slurm.calls("squeue") == [["--noheader", "--format=%S %e", "--jobs=70_3"]]
    assert fake_slurm.env("squeue")["SLURM_TIME_FORMAT"] == "%s"

    monkeypatch.setattr(slurm_commands, "RETRY_S", 0.01)
    asked = fake_slurm.folder / "asked"
    fake_slurm.command("squeue", f'echo >>"{asked}"; [[ $(wc -l <"{asked}") -eq 3 ]] || exit 1; echo "{answer}"')
    assert slurm_commands.ask_times("70_3", os.environ, tries=3) == answer


def test_a_controller_that_is_away_does_not_say_the_times(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "RETRY_S", 0.01)
    fake_slurm.command("squeue", "echo 1 2; exit 1")
    assert slurm_commands.parse_times(slurm_commands.ask_times("71", os.environ)) is None
    assert (slurm_commands.ask_times("71", os.environ, tries=3), len(fake_slurm.calls("squeue"))) == ("", 4)
