"""Agents of tasks and of spares that stay: what the job tells them, over the real channel, and what they do."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from listening import Listening, listening
from slowness import LIMIT_S, scaled, wait_until
from tasks import PLACE, WARNINGS, started

from cluster_ddp import processes
from cluster_ddp.agent.channel import Client, Message
from cluster_ddp.agent.task.orders import Orders

HOST = f"node{os.getpid()}"  # a task kills what it finds of earlier starts there
JOB = {"SLURM_JOB_ID": "71", "SLURMD_NODENAME": HOST, "CLUSTER_DDP_START": "0"}
AGAIN = {"CLUSTER_DDP_START": "1", "MASTER_ADDR": "node 8", "MASTER_PORT": "7"}


def kinds(job: Listening, kind: str) -> list[Message]:
    return [one for one in job.said if one["kind"] == kind]


def wait_for(job: Listening, kind: str, count: int) -> Message:
    """Wait until so many messages of a kind were said. Returns the last one."""
    wait_until(lambda: len(kinds(job, kind)) >= count, said=lambda: job.said)
    return kinds(job, kind)[-1]


def test_a_command_is_stopped_and_started_again_until_the_job_is_over(tmp_path: Path) -> None:
    """What it has left behind, too. Orders for another step are not for this one."""
    script = 'echo "$CLUSTER_DDP_START $MASTER_ADDR $MASTER_PORT $*" >>"$SAID"; setsid sleep 600 & exec sleep 600'
    said, options = tmp_path / "it's said", ("--restarts=1", "--restart-args=--resume")
    with (
        listening() as job,
        started("bash", "-c", script, "bash", options=options, SAID=str(said), **JOB, **job.env) as task,
    ):
        wait_until(said.exists)
        assert wait_for(job, "hello", 1)["stays"] is True
        job.server.tell("stop", to=9)
        job.server.tell("stop", to=0)
        idle = wait_for(job, "idle", 1)
        assert (idle["task"], idle["status"], idle["start"]) == ("2", 137, 0)
        assert not sleepers(said)
        job.server.tell("again", to=9, env=AGAIN | {"MASTER_PORT": "9"})
        job.server.tell("again", to=0, env=AGAIN)
        assert wait_for(job, "hello", 2)["start"] == 1
        wait_until(lambda: len(said.read_text().splitlines()) == 2)
        job.server.tell("stop", to=0)
        assert wait_for(job, "idle", 2)["start"] == 1
        job.server.tell("over", to=0)
        assert task.wait(timeout=scaled(LIMIT_S)) == 137
        assert [one.status for one in job.ends()] == [137, 137]
    assert said.read_text().splitlines()[1] == "1 node 8 7 --resume"


def sleepers(said: Path) -> list[int]:
    return [pid for pid in processes.environments({"SAID": str(said)}) if processes.program(pid) == "sleep"]


@pytest.mark.parametrize("says", [True, False])
def test_a_command_that_runs_when_the_job_is_over_ends_by_itself(tmp_path: Path, says: bool) -> None:
    """Also where the job's agent has ended: Slurm ends the ranks of a cancelled job, which may save before."""
    script = "touch begun; until [ -e go ]; do sleep 0.02; done; exit 5"
    with (
        listening() as job,
        started("bash", "-c", f"cd '{tmp_path}'; {script}", options=("--restarts=1",), **JOB, **job.env) as task,
    ):
        wait_until((tmp_path / "begun").exists)
        if says:
            job.server.tell("over", to=0)
        else:
            job.server.close()
        (tmp_path / "go").touch()
        assert task.wait(timeout=scaled(LIMIT_S)) == 5


def test_an_agent_that_does_not_stay_ends_with_its_command() -> None:
    with listening() as job, started("bash", "-c", "exit 5", **JOB, **job.env) as task:
        assert task.wait(timeout=scaled(LIMIT_S)) == 5
        assert not kinds(job, "idle")
    with started("bash", "-c", "exit 5", options=("--restarts=1",), **JOB) as task:
        assert task.wait(timeout=scaled(LIMIT_S)) == 5, "the job can't be reached"


class Scripted(Client):
    """A connection on which some messages come, or errors."""

    def __init__(self, *events: Message | Exception) -> None:
        self._events = [*events]

    def notice(self) -> None:
        pass

    def hear(self, timeout_s: float) -> Message:
        if not self._events:
            threading.Event().wait()
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


@pytest.mark.parametrize(
    ("events", "heard", "must_end"),
    [
        ([{"kind": "stop", "to": 3}], "stop", True),
        ([{"kind": "again", "to": 3}], "again", False),
        ([{"kind": "stop", "to": 2}, {"kind": "over", "to": 3}], "over", False),
        ([TimeoutError("timed out"), {"kind": "stop", "to": 3}], "stop", True),  # a silent hour
        ([TimeoutError(errno.ETIMEDOUT, "by the kernel")], "cut", True),  # others may compute in its place
        ([OSError(errno.EHOSTUNREACH, "no route")], "cut", True),
        ([ConnectionResetError("closed")], "over", False),
        ([ValueError("not sealed")], "over", False),
    ],
    ids=lambda value: str(value),
)
def test_what_is_heard(events: list[Message | Exception], heard: str, must_end: bool) -> None:
    woken = threading.Event()
    orders = Orders(Scripted(*events), 3, woken.set)
    assert woken.wait(scaled(10))
    assert orders.must_end is must_end
    assert orders.wait()["kind"] == heard
    assert not orders.must_end


@pytest.fixture
def spare(tmp_path: Path) -> Callable[[Listening], subprocess.Popen[bytes]]:
    """Starts the agent of a spare, in whose path a program stands in for Python, and thus for the doctor."""

    def start(job: Listening) -> subprocess.Popen[bytes]:
        agent = [sys.executable, "-m", "cluster_ddp.agent", "spare", "--", "bash", "it's.sh"]
        env = {**PLACE, **JOB, **job.env, "PATH": str(tmp_path), "SLURM_STEP_ID": "3"}
        return subprocess.Popen(agent, env=env, cwd=tmp_path)

    return start


@pytest.mark.parametrize(
    ("doctor", "fault"),
    [
        ("#!/bin/sh\necho 'No problem found.'\n", ""),
        ('#!/bin/sh\necho "it\'s its GPU"; exit 1\n', "it's its GPU"),
        ("#!/bin/sh\nprintf '%s\\n' 'doctor: 1 rank' 'error: its disk' '  is full' ; exit 2\n", "its disk is full"),
        ("#!/bin/sh\necho crashed >&2; exit 1\n", "crashed"),
        ("#!/bin/sh\nexit 1\n", "the doctor ended with status 1"),
        ('#!/bin/sh\necho "$RANK of $WORLD_SIZE, step $SLURM_STEP_ID, $3"; exit 1\n', "0 of 1, step , --quick"),
        ("#!/bin/sh\n/bin/sleep 3 & kill $!; wait $!; echo $?; exit 1\n", "143"),
        ("no program", "the doctor can't be started: [Errno 8] Exec format error: 'python'"),
    ],
    ids=["healthy", "sick", "verdict", "crashed", "silent", "alone", "ends a process", "none"],
)
def test_a_spare_examines_its_node_when_it_is_asked(
    spare: Callable[[Listening], subprocess.Popen[bytes]], tmp_path: Path, doctor: str, fault: str
) -> None:
    (tmp_path / "python").write_text(doctor)
    (tmp_path / "python").chmod(0o755)
    with listening() as job:
        agent = spare(job)
        try:
            assert wait_for(job, "hello", 1)["spare"] is True
            job.server.tell("examine", to=0, nodes=[HOST])
            job.server.tell("examine", to="spare", nodes=["another"])
            job.server.tell("examine", to="spare", nodes=[HOST])
            examined = wait_for(job, "examined", 1)
            assert (examined["host"], examined["fault"], examined["spare"]) == (HOST, fault, True)
            job.server.tell("over", to="spare")
            assert agent.wait(timeout=scaled(LIMIT_S)) == 0
        finally:
            agent.kill()
            agent.wait()
        assert len(kinds(job, "examined")) == 1


@pytest.mark.fault("a warning signal arrives while spares wait", "they are unharmed; no node is excluded")
def test_a_spare_ends_with_the_job_and_not_by_a_warning(
    spare: Callable[[Listening], subprocess.Popen[bytes]],
) -> None:
    with listening() as job:
        agent = spare(job)
        wait_for(job, "hello", 1)
        for number in (*WARNINGS, signal.SIGTERM):
            agent.send_signal(number)
        job.server.tell("examine", to="spare", nodes=[HOST])
        assert wait_for(job, "examined", 1)["spare"] is True
    assert agent.wait(timeout=scaled(LIMIT_S)) == 0
