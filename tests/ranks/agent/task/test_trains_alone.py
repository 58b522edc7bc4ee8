"""agent.task.trains_alone: whether a rank surely trains alone; real processes map a library like torch's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.channel.lines import Key
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.agent.task import trains_alone

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
        assert trains_alone.is_alone(pid) is is_alone


def test_of_a_process_that_has_ended_or_cannot_be_seen_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert not trains_alone.is_alone(process.pid)

    def refuse(pid: int) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(trains_alone, "_has_torch", lambda pid: True)
    monkeypatch.setattr(trains_alone, "_has_tcp", refuse)
    assert not trains_alone.is_alone(1)


class Said(Client):
    def __init__(self) -> None:
        super().__init__(None, Key(b"x"))
        self.said: list[tuple[str, object]] = []

    def say(self, kind: str, **fields: object) -> None:
        self.said.append((kind, fields["rank"]))


@pytest.mark.parametrize(
    ("rank", "world_size", "has_joined", "said"),
    [
        (3, 4, False, [("alone", 3)]),
        (3, 4, True, []),
        (0, 1, False, []),
        (None, 4, False, []),
    ],
)
def test_it_looks_once_when_it_is_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    world_size: int,
    has_joined: bool,
    said: list[tuple[str, int]],
) -> None:
    """A rank's agent sleeps until then, and afterwards until the rank ends."""
    monkeypatch.setattr(trains_alone, "is_alone", lambda pid: True)
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    client = Said()
    watch = trains_alone.GroupCheck(1, rank, world_size, Notes(tmp_path), client)
    if has_joined:
        rank_notes.joined({"CLUSTER_DDP_NOTES": str(tmp_path)}, 3)
    assert watch.look() == (trains_alone.LOOK_AFTER_S if rank is not None and world_size > 1 else float("inf"))
    assert client.said == []
    now[0] += trains_alone.LOOK_AFTER_S
    assert watch.look() == watch.look() == float("inf")
    assert client.said == said
