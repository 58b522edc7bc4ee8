"""agent.job.hearing: what the tasks of a start have said."""

from __future__ import annotations

import pytest

from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.outcome import AGENT_KILLED, End, Failure


def hello(*ranks: int, host: str = "node1", task: str | None = None) -> dict[str, object]:
    return {"kind": "hello", "ranks": list(ranks), "host": host, "task": task}


def ended(rank: int | None, status: int, **more: object) -> dict[str, object]:
    return {"kind": "ended", **End(rank, "node1", status)._replace(**more)._asdict()}


def words(end: End) -> str:
    return ""


@pytest.mark.parametrize("message", [ended(1, 75), ended(1, 0, was_stopped=True), ended(1, 1, was_stopped=True)])
def test_one_that_was_stopped_in_time_is_enough(message: dict[str, object]) -> None:
    hearing = Hearing(2)
    for one in (ended(0, 0), message):
        hearing.hear(one)
    assert hearing.was_stopped and hearing.first_failure(words) is None


def test_a_connection_that_ends_without_a_word_was_killed() -> None:
    hearing = Hearing(4)
    for message in (hello(0, 1), hello(2, 3, host="node2"), ended(0, 0), ended(1, 0), ended(2, 0, host="node2")):
        hearing.hear(message)
    hearing.gone(hello(0, 1))
    assert hearing.first_failure(words) is None
    hearing.gone(hello(2, 3, host="node2"))
    assert hearing.first_failure(words) == Failure(3, "node2", 137, AGENT_KILLED) and not hearing.was_stopped


def test_the_parent_of_a_nodes_ranks_is_named_by_its_node() -> None:
    """Its agent was killed; its ranks, and those of other nodes, end by TERM after it."""
    hearing = Hearing(2)
    for message in (hello(task="1"), hello(2, 3, task="1"), hello(0, task="0"), ended(2, 143), ended(0, 143)):
        hearing.hear(message)
    hearing.gone(hello(host="node2"))
    assert hearing.tasks == {2: 1, 3: 1, 0: 0}
    assert hearing.first_failure(words) == Failure(None, "node2", 137, AGENT_KILLED)


@pytest.mark.parametrize("rank", [0, None])
def test_one_that_has_told_its_end_was_not_killed(rank: int | None) -> None:
    hearing = Hearing(1)
    said = hello() if rank is None else hello(rank)
    for message in (said, ended(rank, 0)):
        hearing.hear(message)
    hearing.gone(said)
    assert hearing.first_failure(words) is None


def test_all_alone_is_said_once_and_one_alone_never(capfd: pytest.CaptureFixture[str]) -> None:
    hearing = Hearing(2)
    hearing.hear({"kind": "alone", "rank": 1})
    hearing.hear({"kind": "alone", "rank": 1})
    assert capfd.readouterr().err == ""
    hearing.hear({"kind": "alone", "rank": 0})
    said = capfd.readouterr().err
    assert said.startswith("warning: None of the 2 ranks of this job has joined a process group so far")
    assert "Hint: " in said


def test_what_is_no_message_is_refused() -> None:
    """The channel then ends that connection, and goes on."""
    for message in ({"kind": "ended"}, {"kind": "alone"}, {}):
        with pytest.raises(KeyError):
            Hearing(2).hear(message)
