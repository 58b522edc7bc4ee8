"""agent.outcome: what failed first, and its record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster_ddp.agent import first_failure, outcome
from cluster_ddp.agent.outcome import End, Failure, Outcome

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:33"


def ends(*statuses: int | tuple[int, str]) -> list[End]:
    """One end a rank, "!" before the words of a consequence."""
    pairs = [one if isinstance(one, tuple) else (one, "") for one in statuses]
    return [End(i, f"n{i}", one, words.lstrip("!"), words.startswith("!")) for i, (one, words) in enumerate(pairs)]


EARLY = "ended with status 0 while other ranks still computed"


@pytest.mark.parametrize(
    ("told", "first"),
    [
        (ends(0, 0), None),
        (ends(75, 0, 75), None),
        (ends(75, 1), "rank 1 on n1 (1)"),
        ([End(0, "n0", 139, was_stopped=True), End(1, "n1", 1, "x", was_stopped=True)], None),
        # The first arrival wins, and causes beat consequences.
        (ends((1, "ValueError: x"), (1, "KeyError: y")), "rank 0 on n0: ValueError: x (1)"),
        (ends((1, f"!{LOST}"), (3, "ValueError: x")), "rank 1 on n1: ValueError: x (3)"),
        (ends(143, (1, "ValueError: x")), "rank 1 on n1: ValueError: x (1)"),
        (ends(143, 3), "rank 1 on n1 (3)"),
        (ends((1, f"!{LOST}"), 143), f"rank 0 on n0: {LOST} (1)"),
        # An exception counts, though TERM came before its rank had ended.
        (ends(143, (143, "ValueError: x")), "rank 1 on n1: ValueError: x (143)"),
        # Signals: who is killed first is the cause; after TERM, KILL is the end of a rank's time to save.
        (ends(137, 143), "rank 0 on n0: killed by SIGKILL (137)"),
        (ends(139, (1, f"!{LOST}")), "rank 0 on n0: killed by SIGSEGV (139)"),
        (ends(134), "rank 0 on n0 (134)"),
        (ends(143, 137, 143), "rank 0 on n0: killed by SIGTERM (143)"),
        (ends((1, f"!{LOST}"), 137), "rank 1 on n1: killed by SIGKILL (137)"),
        (ends((1, f"!{LOST}"), 143, 137), f"rank 0 on n0: {LOST} (1)"),
        (
            [*ends(143, (1, f"!{LOST}")), End(2, "n2", 137, is_oom=True)],
            "rank 2 on n2: killed by the kernel for memory (137)",
        ),
        # A rank that left the others is the cause, unless one is known.
        (ends(0, (1, f"!{LOST}"), 143), f"rank 0 on n0: {EARLY} (1)"),
        (ends(0, (1, f"!{LOST}"), (3, "ValueError: x")), "rank 2 on n2: ValueError: x (3)"),
        (ends((1, f"!{LOST}"), 0), f"rank 0 on n0: {LOST} (1)"),
        (ends(0, 143, 143), "rank 1 on n1: killed by SIGTERM (143)"),
        (ends(0, 3), "rank 1 on n1 (3)"),
        (ends(0, (1, f"!{LOST}"), 137), f"rank 0 on n0: {EARLY} (1)"),
    ],
)
def test_what_failed_first(told: list[End], first: str | None) -> None:
    found = first_failure.by_ends(told)
    assert (None if found is None else f"{found.text} ({found.status})") == first


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ([], "rank 3 on n4: its agent was killed"),
        (ends(143, (1, f"!{LOST}"), 0), "rank 3 on n4: its agent was killed"),
        (ends(0, (1, f"!{LOST}")), "rank 3 on n4: its agent was killed"),
        (ends((1, "ValueError: x")), "rank 0 on n0: ValueError: x"),
    ],
)
def test_an_agent_that_vanished_is_a_cause(told: list[End], first: str) -> None:
    found = first_failure.by_ends(told, [End(3, "n4", 0)])
    assert found is not None
    assert found.text == first
    assert found.status in (137, 1)


SILENT = Failure(None, "n2", 2, "task 1: Exited with exit code 2")


@pytest.mark.parametrize(
    ("told", "silent", "text"),
    [
        (ends(143), SILENT, "n2: task 1: Exited with exit code 2"),
        (ends((1, f"!{LOST}")), SILENT, "n2: task 1: Exited with exit code 2"),
        (ends((3, "ValueError: x")), SILENT, "rank 0 on n0: ValueError: x"),
        (ends((1, f"!{LOST}")), SILENT._replace(status=143), f"rank 0 on n0: {LOST}"),
    ],
)
def test_a_task_that_never_began_counts_before_consequences(told: list[End], silent: Failure, text: str) -> None:
    for gone in ([], [End(0, "n0", 137)]) if silent is SILENT else ([],):
        found = first_failure.by_ends(told, gone, silent)
        assert found is not None and found.text == text


@pytest.mark.parametrize(
    ("told", "words", "text"),
    [
        ([End(None, "n1", 1, "", True)], "ImportError: x", "n1: ImportError: x"),
        ([End(None, "n1", 1, "", True)], "", "n1: the parent of its ranks ended with status 1"),
        ([*ends(0, 0), End(None, "n1", 1, "", True)], "", "n1: the parent of its ranks ended with status 1"),
        ([End(None, "n1", 1, "", True), *ends((1, f"!{LOST}"), 3)], "KeyError: y", "rank 1 on n1: KeyError: y"),
    ],
)
def test_a_parent_of_ranks_says_why_it_failed(told: list[End], words: str, text: str) -> None:
    """Torch is missing, for example. The failure of a rank counts before it."""
    found = first_failure.by_ends(told, words_of=lambda end: words)
    assert found is not None and found.text == text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (End(0, "n1", 137, is_oom=True), "killed by the kernel for memory"),
        (End(0, "n1", 143, is_oom=True), "killed by SIGTERM"),
        (End(0, "n1", 1, "OSError: x", is_oom=True), "OSError: x (the kernel has killed a process for memory)"),
        (End(0, "n1", 1, is_oom=True), "(the kernel has killed a process for memory)"),
    ],
)
def test_out_of_memory_is_not_said_of_a_rank_that_term_ended(end: End, words: str) -> None:
    assert first_failure.by_ends([end]) == Failure(0, "n1", end.status, words)


def test_the_log_is_asked_of_ranks_that_have_not_said_why_until_a_cause_is_found() -> None:
    asked = []

    def words_of(end: End) -> str:
        asked.append(end.rank)
        return {1: LOST, 2: "ValueError:\n x"}.get(end.rank, "")

    told = ends(143, 1, 3, 1, (1, "KeyError: y"))
    told[0:0] = [End(9, "n9", 1, is_consequence=True)]
    assert first_failure.by_ends(told, words_of=words_of) == Failure(2, "n2", 3, "ValueError: x")
    assert asked == [9, 1, 2]


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        (LOST, True),
        ("torch.distributed.DistNetworkError: Connection reset by peer", True),
        ("torch.distributed.DistStoreError: x", False),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            True,
        ),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("RuntimeError: x", False),
    ],
)
def test_which_errors_say_that_another_rank_is_gone(words: str, is_lost: bool) -> None:
    """A library's connection to some server is no rank's."""
    assert first_failure.has_lost_another(words) == is_lost


FIRST = Failure(1, "node2", 1, "ValueError: x")


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
        (Failure(1, "n3", 137, "its agent was killed"), ("n3",), "n3 is lost (node failure)"),
    ],
)
def test_the_failure_in_words(first: Failure | None, lost: tuple[str, ...], text: str) -> None:
    assert Outcome("12", 0, "FAILED", 1, first, lost).failure == text


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    assert outcome.read(folder) is None
    written = Outcome("12_3", 2, "FAILED", 1, FIRST, ("node3",), requeued=True, time=1.7e9)
    outcome.write(folder, written)
    assert outcome.read(folder) == written
    assert json.loads((folder / "outcome.json").read_text()) == {
        "version": 1,
        "job": "12_3",
        "restart": 2,
        "state": "FAILED",
        "status": 1,
        "first": {"rank": 1, "host": "node2", "status": 1, "words": "ValueError: x"},
        "lost_nodes": ["node3"],
        "requeued": True,
        "time": 1.7e9,
    }
    outcome.write(folder, Outcome("12_3", 3, "COMPLETED", 0), shared=True)
    read = outcome.read(folder)
    assert read is not None
    assert (read.restart, read.first, read.time > 1.7e9) == (3, None, True)
    assert [path.name for path in folder.iterdir()] == ["outcome.json"]
    assert (folder / "outcome.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("shared", "mode"), [({}, 0o600), ({"shared": True}, 0o640)])
def test_the_group_may_read_a_record_only_if_it_is_shared(tmp_path: Path, shared: dict[str, bool], mode: int) -> None:
    outcome.write(tmp_path, Outcome("7", 0, "FAILED", 1), **shared)
    assert (tmp_path / "outcome.json").stat().st_mode & 0o777 == mode


def test_a_record_that_cannot_be_written_leaves_nothing_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").mkdir()
    outcome.write(tmp_path, Outcome("1", 0, "COMPLETED", 0))
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]


GOOD = {"version": 1, "job": "12", "restart": 0, "state": "FAILED", "status": 1}


def test_what_is_not_needed_may_be_missing_and_nothing_reaches_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps(GOOD))
    assert outcome.read(tmp_path) == Outcome("12", 0, "FAILED", 1)
    first = {"rank": 0, "host": "n\x1b[1m", "status": 1, "words": "x" * 999 + "\x1b"}
    (tmp_path / "outcome.json").write_text(json.dumps({**GOOD, "first": first, "lost_nodes": ["\x1b"]}))
    read = outcome.read(tmp_path)
    assert read is not None
    assert "\x1b" not in read.failure
    assert len(read.failure) < 400


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        *(json.dumps({key: value for key, value in GOOD.items() if key != left_out}) for left_out in GOOD),
        *(
            json.dumps({**GOOD, **wrong})
            for wrong in (
                {"version": 2},
                {"state": "RUNNING"},
                {"state": ["FAILED"]},
                {"status": 256},
                {"status": "1"},
                {"restart": -1},
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
    ids=lambda content: content[:60],
)
def test_a_damaged_record_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "outcome.json").write_text(content)
    with pytest.raises(ValueError, match=r"."):
        outcome.read(tmp_path)


def test_only_a_small_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        outcome.read(tmp_path)
    path.unlink()
    path.write_text(" " * 2_000_000 + json.dumps(GOOD))
    with pytest.raises(OSError, match="larger"):
        outcome.read(tmp_path)


@pytest.mark.parametrize("status", [134, 139])
def test_what_a_crash_leaves_unsaid_another_rank_says(status: int) -> None:
    """It saw where all ranks were when the connection broke; in whatever order they ended."""
    crashed, saw = End(0, "n0", status), End(1, "n1", 1, "Waiting: rank 0 in a.py:3.", is_consequence=True, waits=True)
    text = f"rank 0 on n0: it {crashed.how}. Rank 1: Waiting: rank 0 in a.py:3."
    for told in ([crashed, saw], [saw, crashed]):
        found = first_failure.by_ends(told)
        assert found == Failure(0, "n0", status, text.partition(": ")[2])
    assert first_failure.by_ends([crashed, saw._replace(waits=False)]).words in ("", "killed by SIGSEGV")
    assert first_failure.by_ends([End(0, "n0", 137), saw]).words == "killed by SIGKILL"
