"""run.outcome and run.journal: how a start ended, in words and as a line of the journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster_ddp.run import journal
from cluster_ddp.run.names import Then
from cluster_ddp.run.outcome import Failure, Outcome

FIRST = Failure(1, "node2", 1, "ValueError: x", "program")


@pytest.mark.parametrize(
    ("first", "lost", "text"),
    [
        (None, (), ""),
        (FIRST, (), "rank 1 on node2: ValueError: x"),
        (Failure(1, "node2", 3, ""), (), "rank 1 on node2"),
        (Failure(None, "n2", 3, "task 1: Exited"), (), "n2: task 1: Exited"),
        (None, ("node3", "node4"), "node3, node4 are lost (node failure)"),
        (None, ("",), "a node of the job is lost (node failure)"),
        (FIRST, ("node3",), "rank 1 on node2: ValueError: x; node3 is lost (node failure)"),
        (Failure(1, "node2", 143, "killed by SIGTERM"), ("node3",), "node3 is lost (node failure)"),
        (Failure(1, "node2", 143, "killed by SIGTERM"), (), "rank 1 on node2: killed by SIGTERM"),
        (Failure(1, "n3", 137, "its agent was killed", "node"), ("n3",), "n3 is lost (node failure)"),
    ],
)
def test_the_failure_in_words(first: Failure | None, lost: tuple[str, ...], text: str) -> None:
    assert Outcome("12", 0, "FAILED", 1, first, lost).failure == text


def test_the_end_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    assert journal.last_end(folder) is None
    written = Outcome("12_3", 2, "FAILED", 1, FIRST, ("node3",), then=Then.RESTART, time=1.7e9)
    assert journal.append_end(folder, written, shared=False)
    assert journal.last_end(folder) == journal.last_end(folder, "12_3") == written
    assert journal.last_end(folder, "12_4") is None
    assert json.loads((folder / "job.jsonl").read_text()) == {
        "event": "end",
        "job": "12_3",
        "start": 2,
        "state": "FAILED",
        "status": 1,
        "first": {"rank": 1, "host": "node2", "status": 1, "words": "ValueError: x", "kind": "program"},
        "lost_nodes": ["node3"],
        "then": "restart",
        "time": 1.7e9,
        "saved": None,
    }
    journal.append_end(folder, Outcome("12_3", 3, "COMPLETED", 0), shared=False)
    read = journal.last_end(folder)
    assert read is not None
    assert (read.start, read.first, read.time > 1.7e9, read.starts_again) == (3, None, True, False)


def test_a_requeue_that_slurm_refused_is_the_end_after_all(tmp_path: Path) -> None:
    stopped = Outcome("12", 0, "STOPPED", 75, then=Then.REQUEUE, time=1.7e9)
    journal.append_end(tmp_path, stopped, shared=False)
    journal.append_end(tmp_path, stopped._replace(job="11", then=Then.END), shared=False)
    assert journal.last_end(tmp_path, "12") == stopped
    journal.append_end(tmp_path, stopped._replace(then=Then.END), shared=False)
    assert journal.last_end(tmp_path, "12") == stopped._replace(then=Then.END)


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o600), (True, 0o640)])
def test_the_group_may_read_the_journal_only_if_it_is_shared(tmp_path: Path, shared: bool, mode: int) -> None:
    journal.append_end(tmp_path, Outcome("7", 0, "FAILED", 1), shared=shared)
    assert (tmp_path / "job.jsonl").stat().st_mode & 0o777 == mode


GOOD = {"event": "end", "time": 1.7e9, "job": "12", "start": 0, "state": "FAILED", "status": 1}


def write(folder: Path, *lines: str) -> None:
    (folder / "job.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_what_is_not_needed_may_be_missing_and_nothing_reaches_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(GOOD))
    assert journal.last_end(tmp_path) == Outcome("12", 0, "FAILED", 1, time=1.7e9)
    first = {"rank": 0, "host": "n\x1b[1m", "status": 1, "words": "x" * 999 + "\x1b"}
    write(tmp_path, json.dumps({**GOOD, "first": first, "lost_nodes": ["\x1b"]}))
    read = journal.last_end(tmp_path)
    assert read is not None
    assert "\x1b" not in read.failure
    assert len(read.failure) < 400


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        *(json.dumps({key: value for key, value in GOOD.items() if key != left_out}) for left_out in GOOD),
        *(
            json.dumps({**GOOD, **wrong})
            for wrong in (
                {"state": "RUNNING"},
                {"state": ["FAILED"]},
                {"status": 256},
                {"status": "1"},
                {"start": -1},
                {"time": float("nan")},
                {"time": "soon"},
                {"time": 10**400},
                {"first": {"rank": "1", "host": "n", "status": 1, "words": ""}},
                {"first": {"rank": 1}},
                {"first": 3},
                {"lost_nodes": 3},
            )
        ),
    ],
    ids=lambda damaged: damaged[:60],
)
def test_a_damaged_end_costs_itself_only(tmp_path: Path, damaged: str) -> None:
    write(tmp_path, damaged)
    assert journal.last_end(tmp_path) is None
    write(tmp_path, json.dumps(GOOD), damaged)
    assert journal.last_end(tmp_path) == Outcome("12", 0, "FAILED", 1, time=1.7e9)
