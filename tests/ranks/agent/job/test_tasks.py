"""agent.job.tasks: who is heard of the tasks of a start, and of the spares. test_restarts.py has whole jobs."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from slowness import scaled, wait_until

from cluster_ddp.agent import channel_server
from cluster_ddp.agent.channel import Client, Key
from cluster_ddp.agent.job.restart import job_nodes
from cluster_ddp.agent.job.task_reports import TaskReports
from cluster_ddp.agent.job.tasks import Tasks
from cluster_ddp.agent.rank_end import End
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.supervision import spawn
from cluster_ddp.agent.supervision.supervisor import Supervisor
from cluster_ddp.run.outcome import Outcome

ENV = {"CLUSTER_DDP_START_ID": "7", "CLUSTER_DDP_SECRET": "5e" * 32, "MASTER_ADDR": "node1", "MASTER_PORT": "7"}


def step_of(srun: list[str]) -> Supervisor:
    """A step that a command stands for."""
    supervisor = Supervisor(Notes(Path("/dev/null")), lambda end: None)
    supervisor.start(None, srun, {**ENV, "PATH": os.environ["PATH"]})
    return supervisor


def of_start(env: Mapping[str, str]) -> dict[str, str]:
    """What differs between starts."""
    return {name: env[name] for name in env if name.startswith(("CLUSTER_DDP_START", "MASTER_"))}


@pytest.fixture
def running() -> Iterator[Tasks]:
    with contextlib.closing(Tasks(channel_server.listen_here(), Key.of_job(ENV), stays=True)) as one:
        yield one


def task_of(running: Tasks, start: int, rank: int) -> Client:
    """The agent of a task, which has said that it begins."""
    client = Client.of_job({**ENV, "CLUSTER_DDP_CHANNEL": f"127.0.0.1:{running.port}", "CLUSTER_DDP_START": str(start)})
    client.say("hello", ranks=[rank], host=f"node{rank}", task=str(rank), stays=True)
    return client


def test_ranks_that_were_left_behind_are_not_heard(running: Tasks) -> None:
    """On a node that was cut off, say, and is back: neither what they say, nor their end."""
    reports = TaskReports("srun", 2, tasks=2)
    running.again(reports, {**ENV, "CLUSTER_DDP_START": "2"})
    old, new = task_of(running, 1, 0), task_of(running, 2, 1)
    old.say("ended", **End(0, "node0", 3)._asdict())
    old.say("idle", task="0", status=3, got_term=False)
    old.close()
    new.say("ended", **End(1, "node1", 4)._asdict())
    new.close()
    wait_until(lambda: reports.hosts_of_gone)
    running._server.drain(scaled(10))
    assert reports.hosts_of_gone == ["node1"] and not reports.are_idle
    ended = reports.judge(Outcome("7", 2, "COMPLETED", 1))
    assert ended.first is not None and ended.first.rank == 1


def test_the_next_start_is_told_where_to_meet(running: Tasks) -> None:
    reports = TaskReports("srun", 1, tasks=1)
    running.again(reports, {**ENV, "CLUSTER_DDP_START": "-1"})
    with contextlib.closing(task_of(running, -1, 0)) as client:
        wait_until(lambda: reports.all_have_begun)
        running.again(reports, {**ENV, "CLUSTER_DDP_START": "2", "HOME": "/it's mine"})
        told = client.hear(scaled(10))
    assert told == {"kind": "again", "to": -1, "env": {**of_start(ENV), "CLUSTER_DDP_START": "2"}}


@pytest.mark.fault(
    "preemption, scancel or the time limit between a failure and the next start, or shortly after it",
    "as without restarts: new progress is saved; the job is requeued, or after scancel ends. If Slurm ends the steps "
    "first, no failure is counted (on Slurm tested by hand)",
)
@pytest.mark.parametrize(("status", "waits"), [(143, True), (1, False)])
def test_tasks_that_term_has_ended_may_be_the_first_of_the_job(
    running: Tasks, monkeypatch: pytest.MonkeyPatch, status: int, waits: bool
) -> None:
    """Slurm ends each step by itself, the batch script last: that is no failure of the ranks."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(running, "_supervisor", SimpleNamespace(wait=lambda *a, **b: 0, is_running=True), raising=False)
    reports = TaskReports("srun", 1, tasks=1)
    running.again(reports, {**ENV, "CLUSTER_DDP_START": "0"})
    with contextlib.closing(task_of(running, 0, 0)) as client:
        client.say("idle", task="0", status=status, got_term=False)
        while not reports.are_idle:
            threading.Event().wait(0.01)
    assert (running.wait(), bool(slept)) == (status, waits)


def test_spares_that_can_be_used_and_those_that_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_nodes, "_EXAMINED_S", 0.2)
    names = ("healthy", "sick", "silent", "gone", "gone before")
    spares = job_nodes.Spares(names)
    spares.gone({"host": "gone before"})
    spares.ask(names)
    spares.hear({"kind": "hello", "host": "silent"})
    spares.hear({"kind": "examined", "host": "healthy", "fault": ""})
    spares.hear({"kind": "examined", "host": "sick", "fault": "it's its GPU"})
    threading.Timer(0.05, spares.gone, [{"host": "gone"}]).start()
    lost, silent = job_nodes._CONNECTION_LOST, job_nodes._SILENT
    assert spares.answers(names) == {"sick": "it's its GPU", "silent": silent, "gone": lost, "gone before": lost}
    assert spares.lost == ["gone before", "gone"]
    spares.ask(["sick"])
    spares.hear({"kind": "examined", "host": "sick", "fault": ""})
    assert spares.answers(["healthy", "sick"]) == {}


def test_spares_whose_agents_are_gone_are_noted_while_the_ranks_train() -> None:
    noted: list[object] = []
    with contextlib.closing(
        Tasks(channel_server.listen_here(), Key.of_job(ENV), stays=True, note_gone=noted.append)
    ) as one:
        one.again(TaskReports("srun", 1, tasks=1), {**ENV, "CLUSTER_DDP_START": "0"})
        one._spares = job_nodes.Spares(("b",))
        one._spares.gone({"host": "b"})
        one._due()
    assert noted == [["b"]]


def test_later_ranks_keep_the_limit_of_open_files(running: Tasks, tmp_path: Path) -> None:
    """Each task's connection is an open file of the job's agent, which raises its own limit."""
    first = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, first[1]), first[1]))
    spawn._first_files.clear()
    try:
        for name in ("first", "again"):
            srun = ["sh", "-c", 'ulimit -Sn >"$0"; ulimit -Hn >>"$0"', str(tmp_path / f"it's {name}")]
            running.start(functools.partial(step_of, srun), TaskReports("srun", 1, tasks=1), 0)
            assert running.wait() == 0
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (first[1], first[1])
        assert (tmp_path / "it's again").read_text() == (tmp_path / "it's first").read_text()
    finally:
        spawn._first_files.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, first)
