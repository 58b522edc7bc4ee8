"""Strangers who know everything of a job but its secret: job id, step, number of ranks, ports, and this package."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import job_ids, run_ranks, slurm_step
from test_store import greeting, is_free, meet_and_greet

from cluster_ddp.agent.channel import Key
from cluster_ddp.errors import RendezvousError
from cluster_ddp.runtime.rendezvous import host_setup, port_discovery, store
from cluster_ddp.runtime.rendezvous.port_discovery import run_key
from cluster_ddp.slurm.port import candidates
from cluster_ddp.slurm.topology import Topology

pytestmark = pytest.mark.full

STORE_PORT = 12345
SECRET = "5a" * 32


@pytest.fixture
def job_id() -> int:
    first = job_ids()
    return next(job for job in range(first, first + 1000) if all(map(is_free, candidates(job))))


def of_the_job(rank: int, job_id: int) -> dict[str, str]:
    return slurm_step(rank, 2, job_id=job_id, CLUSTER_DDP_SECRET=SECRET, OURS="yes")


def two_meet_and_a_stranger_does_not() -> None:
    """The rank that the stranger plays comes late, when the stranger has had all the time it wants."""
    if os.environ.get("OURS"):
        if os.environ["SLURM_PROCID"] == os.environ["LATE"]:
            time.sleep(3)
        meet_and_greet()
        return
    try:
        store.meet(Topology.from_environ(os.environ), "cpu", timeout_s=8)
    except RendezvousError as error:
        print(error)
        raise SystemExit(2) from None


@pytest.mark.parametrize("secret", [{}, {"CLUSTER_DDP_SECRET": "00" * 32}], ids=["none", "another"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stranger_that_comes_first_takes_nobodys_place(
    tmp_path: Path, job_id: int, rank: int, secret: dict[str, str]
) -> None:
    stranger = slurm_step(rank, 2, job_id=job_id, **secret)
    ours = [{**of_the_job(each, job_id), "LATE": str(rank)} for each in range(2)]
    *ends, stranded = run_ranks(two_meet_and_a_stranger_does_not, [*ours, stranger], tmp_path)
    for end in ends:
        assert end.exit_code == 0, end.output
        assert end.output.startswith(greeting(job_id, 2))
    assert stranded.exit_code == 2, stranded.output
    assert ("1 of 2 ranks arrived", "rank 1 did not find rank 0")[rank] in stranded.output


@pytest.fixture
def topology(job_id: int) -> Topology:
    return Topology.from_environ(of_the_job(1, job_id))


@pytest.fixture
def key(topology: Topology) -> Key:
    return run_key(topology, {"CLUSTER_DDP_SECRET": SECRET})


@pytest.fixture
def port(topology: Topology, key: Key) -> Iterator[int]:
    """Of a beacon."""
    with (
        host_setup.bind_first_free(topology) as listener,
        port_discovery.answering(listener, key, STORE_PORT, ranks=2),
    ):
        yield listener.getsockname()[1]


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def everything_from(connection: socket.socket) -> bytes:
    said = b""
    while more := connection.recv(4096):
        said += more
    return said


def ask(port: int, key: Key) -> int | str:
    return port_discovery._ask("127.0.0.1", port, key, 30.0)


@pytest.mark.parametrize(
    "words", [b"0\n", b"0\n0\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\n\n\n", bytes(10_000), b"\xff" * 511 + b"\n"]
)
def test_who_talks_nonsense_is_told_no_port(port: int, key: Key, words: bytes) -> None:
    with call(port) as stranger:
        with contextlib.suppress(OSError):  # it may have been sent away already
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert str(STORE_PORT).encode() not in everything_from(stranger)
    assert ask(port, key) == STORE_PORT


def test_another_secret_another_step_and_none_are_told_no_port(port: int, topology: Topology, job_id: int) -> None:
    other_step = Topology.from_environ({**of_the_job(1, job_id), "SLURM_STEP_ID": "1"})
    for key in (
        run_key(topology, {"CLUSTER_DDP_SECRET": "00" * 32}),
        run_key(other_step, {"CLUSTER_DDP_SECRET": SECRET}),
        run_key(topology, {}),
    ):
        assert ask(port, key) == "another run, or one with another secret"


class Relay:
    """Passes on what a rank and the beacon say, and keeps it."""

    def __init__(self, port: int) -> None:
        self.said: dict[str, list[bytes]] = {"rank": [], "beacon": []}
        self._listener, self._port = socket.create_server(("127.0.0.1", 0)), port
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        rank, _ = self._listener.accept()
        with rank, self._listener, call(self._port) as there:
            for _ in range(2):
                for who, one, other in (("rank", rank, there), ("beacon", there, rank)):
                    self.said[who].append(one.recv(512))
                    other.sendall(self.said[who][-1])


def test_what_was_recorded_is_worth_nothing_the_next_time(port: int, key: Key) -> None:
    relay = Relay(port)
    assert ask(relay.port, key) == STORE_PORT  # who passes everything on is nobody
    with call(port) as stranger:
        stranger.sendall(relay.said["rank"][0])
        assert stranger.recv(512) != relay.said["beacon"][0]
        stranger.sendall(relay.said["rank"][1])
        assert everything_from(stranger) == b""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def play_rank_0() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"".join(relay.said["beacon"]))
                heard.append(everything_from(connection))

        heard: list[bytes] = []
        thread = threading.Thread(target=play_rank_0)
        thread.start()
        assert ask(listener.getsockname()[1], key) == "another run, or one with another secret"
        thread.join(30)
    assert len(heard[0]) == 33  # a nonce and the end of its line: it was told nothing else


def test_a_port_that_was_changed_on_its_way_is_not_believed(port: int, key: Key) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def change() -> None:
            rank, _ = listener.accept()
            with rank, call(port) as there:
                there.sendall(rank.recv(512))
                rank.sendall(there.recv(512))
                there.sendall(rank.recv(512))
                rank.sendall(there.recv(512).replace(b"12345", b"54321"))

        thread = threading.Thread(target=change)
        thread.start()
        assert ask(listener.getsockname()[1], key) == ""
        thread.join(30)


def test_many_silent_callers_hold_nobody_up(port: int, key: Key) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(call(port)) for _ in range(2 + port_discovery._STRANGERS + 100)]
        for stranger in strangers[::2]:
            stranger.sendall(b"0")  # and no end of the line
        assert ask(port, key) == STORE_PORT
        # The first had to go.
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""


def test_what_a_stranger_says_is_shown_without_control_characters(key: Key) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x1b[2Jwho\x07 are you?\n")
                everything_from(connection)

        threading.Thread(target=talk, daemon=True).start()
        assert ask(listener.getsockname()[1], key) == "[2Jwho  are you?"


def test_the_secret_is_nowhere_to_be_seen(key: Key, topology: Topology) -> None:
    assert SECRET not in f"{key!r} {vars(key)} {topology!r} {topology.exports()}"
    assert key.mac("store") != run_key(topology, {}).mac("store")
