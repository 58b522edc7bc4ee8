"""agent.task.no_process_group: whether a rank surely trains alone; real processes map a library like torch's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.channel import Client, Key
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.task import no_process_group

MAP = "import mmap, socket, sys, time; file = open(sys.argv[1], 'rb')\n"
MAP += "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
WAIT = "print('ready', flush=True); time.sleep(600)\n"
LISTEN = "one = socket.create_server(('127.0.0.1', 0))\n"
CONNECT = "one = socket.create_connection(('127.0.0.1', int(sys.argv[2])))\n"
LOCAL = "one = socket.socketpair()\n"


@contextlib.contextmanager
def running(code: str, library: Path, *arguments: str, shell: bool = False) -> Iterator[int]:
    library.write_bytes(b"x")
    command = [sys.executable, "-c", code, str(library), *arguments]
    behind = ["bash", "-c", '"$@"; exit $?', "bash"] if shell else []
    with subprocess.Popen([*behind, *command], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize(
    ("library", "code", "is_alone"),
    [
        ("libtorch_x.so", MAP + WAIT, True),
        ("libtorch_x.so", MAP + LOCAL + WAIT, True),
        ("libtorch_x.so", MAP + LISTEN + WAIT, False),
        ("libtorch_x.so", MAP + CONNECT + WAIT, False),
        ("libother.so", MAP + WAIT, False),
        ("libtorch_with_libmpi.so", MAP + WAIT, False),
    ],
)
def test_who_has_torch_and_no_connection_is_alone(
    tmp_path: Path, library: str, code: str, is_alone: bool, shell: bool
) -> None:
    """Also behind `bash run.sh`. MPI needs no TCP."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pid = stack.enter_context(running(code, tmp_path / library, str(server.getsockname()[1]), shell=shell))
        assert no_process_group.is_alone(pid) is is_alone


def test_of_a_process_that_has_ended_or_cannot_be_seen_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert not no_process_group.is_alone(process.pid)

    def refuse(pid: int) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(no_process_group, "_has_torch", lambda pid: True)
    monkeypatch.setattr(no_process_group, "_has_tcp", refuse)
    assert not no_process_group.is_alone(1)


class Said(Client):
    def __init__(self) -> None:
        super().__init__(None, Key(b"x"))
        self.said: list[tuple[str, object]] = []

    def say(self, kind: str, **fields: object) -> None:
        self.said.append((kind, fields["rank"]))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("rank", "world_size", "has_joined", "said"),
    [
        (3, 4, False, [("alone", 3)]),
        (3, 4, True, []),
        (0, 1, False, []),
    ],
)
def test_it_is_said_once_when_it_is_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    now: list[float],
    rank: int,
    world_size: int,
    has_joined: bool,
    said: list[tuple[str, int]],
) -> None:
    """Afterwards a rank's agent sleeps until the rank ends, as it does if there is one rank."""
    monkeypatch.setattr(no_process_group, "is_alone", lambda pid: True)
    monkeypatch.setattr(no_process_group, "cpu_s", lambda pid: 60.0)
    client = Said()
    check = no_process_group.GroupCheck(1, rank, world_size, Notes(tmp_path), client)
    if has_joined:
        rank_notes.joined({"CLUSTER_DDP_NOTES": str(tmp_path)}, 3)
    assert check.look() == (no_process_group.EVERY_S if world_size > 1 else float("inf"))
    assert client.said == []
    while (wait_s := check.look()) < float("inf"):
        now[0] += wait_s
        assert client.said == []
    assert world_size == 1 or now[0] - 1000 >= no_process_group.LAST_LOOK_S
    assert check.look() == float("inf")
    check.ended()
    assert client.said == said


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([True] * 17, [("alone", 3)]),
        ([False] * 3 + [True] * 17, [("alone", 3)]),  # torch took some seconds
        ([True] * 16, []),  # it may have joined since the last look
        ([True] * 40 + [False], []),  # it has joined
    ],
)
def test_a_short_training_that_was_alone_is_told_at_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    now: list[float],
    looks: list[bool],
    said: list[tuple[str, int]],
) -> None:
    left = list(looks)
    monkeypatch.setattr(no_process_group, "is_alone", lambda pid: left.pop(0))
    monkeypatch.setattr(no_process_group, "cpu_s", lambda pid: 60.0)
    client = Said()
    check = no_process_group.GroupCheck(1, 3, 4, Notes(tmp_path), client)
    waits_s = []
    while left:
        waits_s.append(check.look())
        now[0] += waits_s[-1]
    assert waits_s[1:] == [0.5 if alone else 2.0 for alone in looks]  # it may join and end in a second
    assert client.said == []
    check.ended()
    assert client.said == said


@pytest.mark.parametrize(("ends", "said"), [(False, [("alone", 3)]), (True, [])])
def test_of_a_rank_that_has_hardly_computed_nothing_is_said_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float], ends: bool, said: list[tuple[str, int]]
) -> None:
    """It imports, for minutes, where the node is busy or its files are slow."""
    used_s = [2.0]
    monkeypatch.setattr(no_process_group, "is_alone", lambda pid: True)
    monkeypatch.setattr(no_process_group, "cpu_s", lambda pid: used_s[0])
    client = Said()
    check = no_process_group.GroupCheck(1, 3, 4, Notes(tmp_path), client)
    while now[0] < 1000.0 + 3 * no_process_group.LAST_LOOK_S:
        now[0] += check.look()
    if ends:
        check.ended()
    else:
        used_s[0] = 20.0
        now[0] += check.look()
    assert client.said == said


def test_what_a_tree_of_processes_has_computed() -> None:
    used_s = time.process_time()
    assert no_process_group.cpu_s(os.getpid()) >= used_s - 0.1  # it is counted in clock ticks
