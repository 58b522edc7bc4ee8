"""agent.job.task_reports: what the tasks of a start have said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.agent.channel import Message
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.rank_end import End
from cluster_ddp.run.outcome import AGENT_KILLED, Failure, Outcome


def hello(*ranks: int, host: str = "node1", task: str | None = None, stays: bool = False) -> Message:
    return {"kind": "hello", "ranks": list(ranks), "host": host, "task": task, "stays": stays}


def ended(rank: int | None, status: int, **more: Any) -> Message:
    return {"kind": "ended", **End(rank, "node1", status)._replace(**more)._asdict()}


def idle(task: int, status: int = 0) -> Message:
    return {"kind": "idle", "task": str(task), "status": status, "got_term": False}


def heard(*messages: Message, launcher: str = "srun", tasks: int = 0) -> TaskReports:
    reports = TaskReports(launcher, 2, tasks=tasks)
    for message in messages:
        reports.hear(message)
    return reports


def judged(reports: TaskReports, status: int = 1) -> Outcome:
    return reports.judge(Outcome("12", 0, "COMPLETED", status))


@pytest.mark.parametrize("message", [ended(1, 75), ended(1, 0, was_stopped=True), ended(1, 1, was_stopped=True)])
def test_one_that_was_stopped_in_time_is_enough(message: Message) -> None:
    assert judged(heard(ended(0, 0), message)) == Outcome("12", 0, "STOPPED", 75)


def test_a_connection_that_ends_without_a_word_was_killed() -> None:
    reports = heard(hello(0, 1), hello(2, 3, host="node2"), ended(0, 0), ended(1, 0), ended(2, 0, host="node2"))
    reports.gone(hello(0, 1))
    assert judged(reports).first is None
    reports.gone(hello(2, 3, host="node2"))
    assert judged(reports).first == Failure(3, "node2", 137, AGENT_KILLED, "node")


def test_of_an_agent_that_was_killed_its_first_rank_is_named() -> None:
    """Its ranks, and those of other nodes, end by TERM after it."""
    reports = heard(hello(2, 3, task="1"), hello(0, task="0"), ended(0, 143))
    reports.gone(hello(2, 3, host="node2"))
    assert judged(reports).first == Failure(2, "node2", 137, AGENT_KILLED, "node")


def test_one_that_has_told_its_end_was_not_killed() -> None:
    reports = heard(hello(0), ended(0, 0))
    reports.gone(hello(0))
    assert judged(reports).first is None


@pytest.mark.parametrize(
    ("one", "log"), [(End(5, "node2", 1), 5), (Failure(5, "node2", 1, ""), 5), (Failure(None, "node2", 1, ""), None)]
)
def test_which_log_is_whose(tmp_path: Path, one: End | Failure, log: int | None) -> None:
    reports = TaskReports("fork", 8, tmp_path, tasks=2)
    assert reports.log_of(one) == (None if log is None else tmp_path / f"task-{log}.log")


@pytest.mark.parametrize(
    ("launcher", "first"),
    [
        ("srun", Failure(1, "node2", 3, "Exited with exit code 3")),
        ("fork", Failure(None, "node2", 3, "task 1: Exited with exit code 3")),
    ],
)
def test_a_silent_task_has_a_ranks_number_only_if_srun_starts_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, first: Failure
) -> None:
    monkeypatch.setattr("cluster_ddp.agent.job.job_log._JOB_LOG", tmp_path / "job.log")
    reports = heard(launcher=launcher, tasks=2)
    (tmp_path / "job.log").write_text("srun: error: node2: task 1: Exited with exit code 3\n")
    assert judged(reports, status=3).first == first


def test_who_has_begun_is_read_while_nobody_adds_to_it() -> None:
    """The channel's thread does that."""

    class Begun(set[int]):
        def __len__(self) -> int:
            assert reports._lock.locked()
            return super().__len__()

    reports = heard(tasks=1)
    reports._begun = Begun([0])
    assert reports.all_have_begun and reports.has_begun


def test_all_alone_is_said_once_and_one_alone_never(capfd: pytest.CaptureFixture[str]) -> None:
    reports = heard({"kind": "alone", "rank": 1}, {"kind": "alone", "rank": 1})
    assert capfd.readouterr().err == ""
    reports.hear({"kind": "alone", "rank": 0})
    said = capfd.readouterr().err
    assert said.startswith("warning: None of the 2 ranks of this job has joined a process group so far")
    assert "Hint: " in said


def test_what_is_no_message_is_refused() -> None:
    """The channel then ends that connection, and goes on."""
    for message in ({"kind": "ended"}, {"kind": "alone"}, {}):
        with pytest.raises(KeyError):
            heard(message)


LOST = hello(1, host="node2", task="1", stays=True)


@pytest.mark.parametrize(
    ("messages", "gone", "are_idle", "hosts_of_gone", "statuses"),
    [
        ([idle(0)], [], False, [], []),
        ([idle(0), idle(1)], [], True, [], []),
        ([idle(1, 75), idle(0, 1)], [], True, [], [75, 1]),
        ([idle(0)], [LOST], True, ["node2"], [137]),  # else a job whose other ranks are done would be complete
        ([idle(0), idle(1)], [LOST], True, ["node2"], []),
        ([idle(0)], [hello(1, host="node2", task="1")], False, [], []),  # of a task that is not idle
    ],
)
def test_commands_that_have_ended_and_agents_that_are_gone(
    messages: list[Message], gone: list[Message], are_idle: bool, hosts_of_gone: list[str], statuses: list[int]
) -> None:
    reports = heard(*messages, tasks=2)
    for one in gone:
        reports.gone(one)
    assert (reports.are_idle, reports.hosts_of_gone, reports.statuses) == (are_idle, hosts_of_gone, statuses)
    assert reports.is_over(time.monotonic()) is are_idle


@pytest.mark.parametrize(("launcher", "hellos"), [("fork", [(2, 3)]), ("srun", [(2,), (3,)])])
def test_the_logs_of_a_lost_nodes_ranks_are_known(launcher: str, hellos: list[tuple[int, ...]], tmp_path: Path) -> None:
    """A task of the fork launcher is number 1 of its job here, and rank 1 is on the other node."""
    reports = TaskReports(launcher, 4, tmp_path, tasks=2)
    for number, ranks in enumerate(hellos):
        reports.gone(hello(*ranks, host="node2", task=str(1 if launcher == "fork" else 2 + number), stays=True))
    assert reports.logs_of_gone() == [tmp_path / "task-2.log", tmp_path / "task-3.log"]


@pytest.mark.parametrize(
    ("message", "most_s"),
    [
        (ended(0, 0), float("inf")),
        (ended(0, 1), 2),  # the others may still say why they fail
        (ended(0, 137), 0.5),
        (ended(0, 1, failure_kind="hang"), 0.5),  # it speaks for them
        (ended(0, 75), 30),  # the others save
        (ended(0, 1, was_stopped=True), 30),
    ],
)
def test_a_start_is_over_soon_after_a_rank_has_failed(
    message: Message, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 7.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reports = heard(message, tasks=2)
    assert reports.due_s(now) == most_s and not reports.is_over(now)
    assert reports.is_over(now + min(most_s, 1000)) is (most_s <= 1000)
    reports.hear(ended(1, 75))
    assert reports.due_s(now) == min(most_s, 30), "a second end does not put it off"


def test_ranks_that_are_killed_because_of_a_failure_are_no_news() -> None:
    reports = heard(ended(0, 3), tasks=2)
    reports.ignore_further_ends()
    for message in (ended(1, 137), idle(0, 3), idle(1, 137)):
        reports.hear(message)
    assert judged(reports).first == Failure(0, "node1", 3, "")
    assert reports.are_idle


@pytest.mark.parametrize(
    ("ends", "everywhere"),
    [
        ([(0, "x"), (1, "x")], True),
        ([(0, "x"), (0, "x")], False),
        ([(0, "x"), (1, "y")], False),
        (
            [(0, "OutOfMemoryError: 2.00 GiB; 71.25 MiB is free"), (1, "OutOfMemoryError: 2.00 GiB; 8 MiB is free")],
            True,
        ),
        ([(0, ""), (1, "")], False),
    ],
)
def test_an_error_of_all_ranks(ends: list[tuple[int, str]], everywhere: bool) -> None:
    reports = heard(*(ended(rank, 1, words=words) for rank, words in ends), tasks=2)
    assert reports.failed_everywhere(ends[0][1]) is everywhere


@pytest.mark.parametrize(
    ("missed_s", "later_s", "is_it"), [(900, 5, True), (30, 5, False), (900, 600, False), (0, 0, False)]
)
def test_a_failure_soon_after_a_long_suspension(
    monkeypatch: pytest.MonkeyPatch, missed_s: float, later_s: float, is_it: bool
) -> None:
    """Slices of gang scheduling are shorter than any limit of ranks that wait for each other."""
    clock, reports = time.monotonic, TaskReports("srun", 2, tasks=2)
    reports.note_suspension(missed_s)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + later_s)
    assert reports.is_just_resumed is is_it
