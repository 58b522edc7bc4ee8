"""agent.job.hearing: what the tasks of a start have said."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.outcome import AGENT_KILLED, End, Failure, Outcome


def hello(*ranks: int, host: str = "node1", task: str | None = None) -> dict[str, object]:
    return {"kind": "hello", "ranks": list(ranks), "host": host, "task": task}


def ended(rank: int | None, status: int, **more: object) -> dict[str, object]:
    return {"kind": "ended", **End(rank, "node1", status)._replace(**more)._asdict()}


def heard(*messages: dict[str, object], launcher: str = "srun", tasks: int = 0) -> Hearing:
    hearing = Hearing(launcher, 2, tasks=tasks)
    for message in messages:
        hearing.hear(message)
    return hearing


def judged(hearing: Hearing, status: int = 1) -> Outcome:
    return hearing.judge(Outcome("12", 0, "COMPLETED", status))


@pytest.mark.parametrize("message", [ended(1, 75), ended(1, 0, was_stopped=True), ended(1, 1, was_stopped=True)])
def test_one_that_was_stopped_in_time_is_enough(message: dict[str, object]) -> None:
    assert judged(heard(ended(0, 0), message)) == Outcome("12", 0, "STOPPED", 75)


def test_a_connection_that_ends_without_a_word_was_killed() -> None:
    hearing = heard(hello(0, 1), hello(2, 3, host="node2"), ended(0, 0), ended(1, 0), ended(2, 0, host="node2"))
    hearing.gone(hello(0, 1))
    assert judged(hearing).first is None
    hearing.gone(hello(2, 3, host="node2"))
    assert judged(hearing).first == Failure(3, "node2", 137, AGENT_KILLED)


def test_the_parent_of_a_nodes_ranks_is_named_by_its_node() -> None:
    """Its agent was killed; its ranks, and those of other nodes, end by TERM after it."""
    hearing = heard(hello(task="1"), hello(2, 3, task="1"), hello(0, task="0"), ended(2, 143), ended(0, 143))
    hearing.gone(hello(host="node2"))
    assert judged(hearing).first == Failure(None, "node2", 137, AGENT_KILLED)


@pytest.mark.parametrize("rank", [0, None])
def test_one_that_has_told_its_end_was_not_killed(rank: int | None) -> None:
    said = hello() if rank is None else hello(rank)
    hearing = heard(said, ended(rank, 0))
    hearing.gone(said)
    assert judged(hearing).first is None


def test_a_task_has_begun_however_many_of_it_say_hello() -> None:
    """With torchrun, the parent of a node's ranks does, and each rank; a process that forks has no task's number."""
    one = heard(hello(task="0"), hello(0, task="0"), hello(1, task="0"), hello(0, 1), launcher="torchrun", tasks=2)
    assert not one.all_have_begun
    one.hear(hello(host="node2", task="1"))
    assert one.all_have_begun


@pytest.mark.parametrize(
    ("launcher", "tasks", "end", "log"),
    [
        ("srun", 2, End(1, "node2", 1), 1),
        ("torchrun", 2, End(5, "node2", 1), 1),
        ("torchrun", 2, End(None, "node2", 1), 1),
        ("torchrun", 2, End(None, "node9", 1), None),
        ("torchrun", 0, End(5, "node2", 1), 0),
        ("fork", 2, End(5, "node2", 1), 5),
        ("fork", 2, End(None, "node2", 1), None),
        ("fork", 0, End(None, "node2", 1), 0),
    ],
)
def test_which_log_is_whose(tmp_path: Path, launcher: str, tasks: int, end: End, log: int | None) -> None:
    hearing = Hearing(launcher, 8, tmp_path, tasks=tasks)
    hearing.hear(hello(host="node2", task="1"))
    assert hearing.log_of(end) == (None if log is None else tmp_path / f"task-{log}.log")


def test_all_alone_is_said_once_and_one_alone_never(capfd: pytest.CaptureFixture[str]) -> None:
    hearing = heard({"kind": "alone", "rank": 1}, {"kind": "alone", "rank": 1})
    assert capfd.readouterr().err == ""
    hearing.hear({"kind": "alone", "rank": 0})
    said = capfd.readouterr().err
    assert said.startswith("warning: None of the 2 ranks of this job has joined a process group so far")
    assert "Hint: " in said


def test_what_is_no_message_is_refused() -> None:
    """The channel then ends that connection, and goes on."""
    for message in ({"kind": "ended"}, {"kind": "alone"}, {}):
        with pytest.raises(KeyError):
            heard(message)
