"""agent.job.tasks: who is heard of the tasks of a start, and of the spares. test_restarts.py has whole jobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import scaled, wait_until

from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.job import tasks
from cluster_ddp.agent.job.hearing import Hearing
from cluster_ddp.agent.job.tasks import Spares, Tasks
from cluster_ddp.agent.notes import Notes
from cluster_ddp.agent.outcome import End, Outcome

ENV = {"CLUSTER_DDP_SECRET": "5e" * 32, "MASTER_ADDR": "node1", "MASTER_PORT": "7"}


@pytest.fixture
def running() -> Iterator[Tasks]:
    with contextlib.closing(Tasks(Notes(Path("/dev/null")), ENV, (), stays=True)) as one:
        yield one


def task_of(running: Tasks, start: int, rank: int) -> Client:
    """The agent of a task, which has said that it begins."""
    client = Client.of_job({**ENV, "CLUSTER_DDP_CHANNEL": f"127.0.0.1:{running.port}", "CLUSTER_DDP_START": str(start)})
    client.say("hello", ranks=[rank], host=f"node{rank}", task=str(rank), stays=True)
    return client


def test_ranks_that_were_left_behind_are_not_heard(running: Tasks) -> None:
    """On a node that was cut off, say, and is back: neither what they say, nor their end."""
    hearing = Hearing("srun", 2, tasks=2)
    running.again(hearing, {**ENV, "CLUSTER_DDP_START": "2"})
    old, new = task_of(running, 1, 0), task_of(running, 2, 1)
    old.say("ended", **End(0, "node0", 3)._asdict())
    old.say("idle", task="0", status=3)
    old.close()
    new.say("ended", **End(1, "node1", 4)._asdict())
    new.close()
    wait_until(lambda: hearing.gone_from)
    running._server.drain(scaled(10))
    assert hearing.gone_from == ["node1"] and not hearing.are_idle
    ended = hearing.judge(Outcome("7", 2, "COMPLETED", 1))
    assert ended.first is not None and ended.first.rank == 1


def test_the_next_start_is_told_where_to_meet(running: Tasks) -> None:
    hearing = Hearing("srun", 1, tasks=1)
    running.again(hearing, {**ENV, "CLUSTER_DDP_START": "-1"})
    with contextlib.closing(task_of(running, -1, 0)) as client:
        wait_until(lambda: hearing.all_have_begun)
        running.again(hearing, {**ENV, "CLUSTER_DDP_START": "2", "HOME": "/it's mine"})
        told = client.hear(scaled(10))
    meeting = {"CLUSTER_DDP_START": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "7"}
    assert told == {"kind": "again", "step": -1, "env": meeting}


def test_spares_that_can_be_used_and_those_that_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_EXAMINED_S", 0.2)
    names = ("healthy", "sick", "silent", "gone", "gone before")
    spares = Spares(names)
    spares.gone("gone before")
    spares.ask(names)
    spares.hear({"kind": "hello", "host": "silent"})
    spares.hear({"kind": "examined", "host": "healthy", "fault": ""})
    spares.hear({"kind": "examined", "host": "sick", "fault": "it's its GPU"})
    threading.Timer(0.05, spares.gone, ["gone"]).start()
    lost, silent = tasks._LOST, tasks._SILENT
    assert spares.answers(names) == {"sick": "it's its GPU", "silent": silent, "gone": lost, "gone before": lost}
    assert spares.lost == ["gone before", "gone"]
    spares.ask(["sick"])
    spares.hear({"kind": "examined", "host": "sick", "fault": ""})
    assert spares.answers(["healthy", "sick"]) == {}
