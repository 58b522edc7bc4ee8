"""The failure marker: written once, by the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.errors import DataError
from cluster_ddp.runtime.failure import failure_marker
from cluster_ddp.submission.run_dirs import first_failure


def test_the_first_failure_stays_with_its_status(tmp_path: Path) -> None:
    env = {"CLUSTER_DDP_FAILED": str(tmp_path / ".failed-0")}
    failure_marker.note(env, 2, "n1", ValueError("two\nlines \x1b[31m"))
    failure_marker.note(env, 1, "n1", ValueError("later"))
    failure_marker.note_status(env, 1, "n1", 1)
    assert first_failure(tmp_path) == ("rank 2 on n1: ValueError: two lines ?[31m", None)
    failure_marker.note_status(env, 2, "n1", 9)
    failure_marker.note_status(env, 2, "n1", 8)
    assert first_failure(tmp_path) == ("rank 2 on n1: ValueError: two lines ?[31m", 9)


@pytest.mark.parametrize(
    ("status", "is_oom", "how"),
    [
        (137, False, ": killed by SIGKILL"),
        (137, True, ": killed by the kernel for memory"),
        (139, True, ": killed by SIGSEGV"),
        *((134, False, ""), (255, False, ""), (1, True, "")),
    ],
)
def test_a_signal_ends_a_rank_without_a_word(tmp_path: Path, status: int, is_oom: bool, how: str) -> None:
    env = {"CLUSTER_DDP_FAILED": str(tmp_path / ".failed-0")}
    failure_marker.note_status(env, 2, "n1", status, is_oom=is_oom)
    assert first_failure(tmp_path) == (f"rank 2 on n1{how}", status)


def test_our_own_errors_are_one_line(tmp_path: Path) -> None:
    env = {"CLUSTER_DDP_FAILED": str(tmp_path / ".failed-1")}
    failure_marker.note(env, 0, "n1", DataError("Reading x:", "no.", "y"))
    assert first_failure(tmp_path) == ("rank 0 on n1: Reading x: no.", None)


def test_without_a_place_to_write_nothing_happens(tmp_path: Path) -> None:
    failure_marker.note({}, 0, "n1", ValueError())
    failure_marker.note_status({"CLUSTER_DDP_FAILED": str(tmp_path / "missing" / "x")}, 0, "n1", 1)
    assert first_failure(tmp_path) == ("", None)
