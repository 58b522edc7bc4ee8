"""Which job a shell belongs to, with a squeue that stands in for Slurm's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster_ddp.agent.job import allocation

OF_PARENT = {
    "SLURM_ARRAY_JOB_ID": "16",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_RESTART_COUNT": "2",
}
OF_TASK = {**OF_PARENT, "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ("17 17 N/A 0", {"SLURM_RESTART_COUNT": "0"}),  # submitted by task 3 of array 16
        ("16 16 4-7 0\n17 16 3 1", OF_TASK),
        ("", OF_PARENT),  # Slurm does not answer
        ("18 18 N/A 0", OF_PARENT),  # it speaks of another job
    ],
)
def test_the_array_of_the_job_that_has_submitted_this_one_is_not_its(
    tmp_path: Path, said: str, own: dict[str, str]
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n")
    (tmp_path / "squeue").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    assert allocation.own({**env, **OF_PARENT}) == {**env, **own}


def test_a_job_that_inherits_nothing_asks_nobody() -> None:
    env = {"PATH": "/nowhere", "SLURM_JOB_ID": "17"}
    assert allocation.own(env) == env
