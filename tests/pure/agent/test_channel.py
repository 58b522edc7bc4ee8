"""The channel between tasks and the job: what is said arrives, in order, from those who have the secret only."""

from __future__ import annotations

import contextlib
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp.agent import channel_server
from cluster_ddp.agent.channel import Client, Key, Message
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.run.names import Env

KEY = Key(b"secret")


class Job:
    """A server, with what it hears."""

    def __init__(self, *, notices: bool = False) -> None:
        self.heard: queue.Queue[Message] = queue.Queue()
        self.gone: queue.Queue[Message] = queue.Queue()
        self.server = Server(channel_server.listen_here(), KEY, self._hear, self.gone.put, notices=notices)

    def _hear(self, message: Message) -> None:
        if message["kind"] == "odd":
            raise KeyError("rank")
        self.heard.put(message)

    def next(self) -> Message:
        return self.heard.get(timeout=scaled(LIMIT_S))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=scaled(LIMIT_S))


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.server.close()


def test_both_sides_are_heard_in_order(job: Job) -> None:
    clients = [Client(job.connect(), KEY) for _ in range(3)]
    for number, client in enumerate(clients):
        client.say("hello", rank=number)
        client.say("ended", status=number, words="x" * 200_000)
        assert job.next() == {"kind": "hello", "rank": number}
        assert job.next()["status"] == number
    for status in (1, 2):
        job.server.tell("end", status=status)
    for client in clients:
        assert [client.hear(scaled(5))["status"] for _ in range(2)] == [1, 2]
        client.close()
    assert sorted(job.gone.get(timeout=scaled(LIMIT_S))["rank"] for _ in clients) == [0, 1, 2]
    job.server.drain(scaled(5))


def test_the_job_is_found_by_the_environment(job: Job) -> None:
    env = {Env.CHANNEL: f"127.0.0.1:{job.server.port}", Env.SECRET: "secret"}
    client = Client.of_job(env)
    client.say("hello")
    assert job.next() == {"kind": "hello", "start": 0}
    client.close()


def test_each_message_says_of_which_start_it_is(job: Job) -> None:
    client = Client.of_job({Env.CHANNEL: f"127.0.0.1:{job.server.port}", Env.SECRET: "secret", Env.START: "3"})
    client.always["spare"] = True
    client.say("hello", rank=1)
    assert job.next() == {"kind": "hello", "start": 3, "spare": True, "rank": 1}
    client.close()


@pytest.mark.fault("a node is silent for two seconds and answers again", "training is not affected")
@pytest.mark.parametrize("notices", [True, False])
def test_a_machine_that_is_cut_off_is_noticed_within_seconds(notices: bool) -> None:
    """On both sides: tcp(7) has the options. Nothing in a test can lose packets."""
    job = Job(notices=notices)
    client = Client(job.connect(), KEY)
    client.say("hello")
    job.next()
    if notices:
        client.notice()
    (theirs,) = (caller.connection for caller in job.server._callers)
    assert client._connection is not None
    for connection in (client._connection, theirs):
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        found = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert (found == [1, 1, 3, 4000]) is notices
        assert bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) is notices
    client.close()
    job.server.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "127.0.0.1:none", "nohost.invalid:1"])
def test_a_job_that_can_not_be_reached_costs_no_task(address: str) -> None:
    client = Client.of_job({Env.CHANNEL: address, Env.SECRET: "not hexadecimal"})
    client.say("hello")
    client.close()


def test_who_lacks_the_secret_is_not_heard_and_not_told(job: Job) -> None:
    with pytest.raises(ConnectionAbortedError):
        Client(job.connect(), Key(b"another"))
    with job.connect() as stranger:
        stranger.sendall(b"0000\n")
        nonce, _, proof = stranger.recv(200).strip().partition(b" ")
        assert KEY.proves(proof, "channel", b"0000 " + nonce)
        job.server.tell("end")  # it has proved nothing so far
        forged = Key(b"").mac("task", b"0000 " + nonce, b"1", b'{"kind": "ended"}')
        stranger.sendall(forged + b' {"kind": "ended"}\n')
        assert stranger.recv(200) == b""
    assert job.heard.empty() and job.gone.empty()


def test_a_line_is_heard_once_and_in_its_connection_only(job: Job) -> None:
    """A stranger on the way repeats what it has seen."""
    said: list[bytes] = []
    first = job.connect()
    sendall = first.sendall

    class Recorded:
        def __getattr__(self, name: str) -> object:
            return getattr(first, name)

        def sendall(self, data: bytes) -> None:
            said.append(data)
            sendall(data)

    client = Client(Recorded(), KEY)  # type: ignore[arg-type]
    client.say("ended", status=0)
    assert job.next()["status"] == 0
    with job.connect() as other:
        other.sendall(b"".join(said))
        other.recv(200)
        assert other.recv(200) == b""
    first.sendall(said[-1])
    assert job.gone.get(timeout=scaled(LIMIT_S))["kind"] == "ended"
    assert job.heard.empty()


def test_nonsense_closes_its_own_connection_only(job: Job) -> None:
    client = Client(job.connect(), KEY)
    odd = Client(job.connect(), KEY)
    odd.say("odd")
    with pytest.raises(ConnectionError):
        odd.hear(scaled(5))
    with job.connect() as endless, pytest.raises(OSError):  # its line is not kept
        for _ in range(200):
            endless.sendall(bytes(1 << 16))
    client.say("hello", rank=1)
    assert job.next()["rank"] == 1
    client.close()


def answering(words: bytes) -> int:
    """The port of a stranger that says some words, or nothing."""
    listener = channel_server.listen_here()

    def serve() -> None:
        connection, _ = listener.accept()
        if words:
            connection.recv(100)
            connection.sendall(words)
            connection.close()
        else:
            time.sleep(scaled(2))
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (b"", TimeoutError),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ConnectionAbortedError),
        (b"HTTP/1.1 400 Bad Request", ConnectionResetError),
    ],
)
def test_another_program_on_the_port_is_recognised(words: bytes, error: type[OSError]) -> None:
    connection = socket.create_connection(("127.0.0.1", answering(words)))
    with pytest.raises(error):
        Client(connection, KEY, scaled(0.5))
    assert connection.fileno() == -1


def test_what_another_has_changed_on_its_way_is_not_believed() -> None:
    """The end of a server is another thing than its silence."""
    ours, theirs = socket.socketpair()
    answer: list[Client] = []
    thread = threading.Thread(target=lambda: answer.append(Client(ours, KEY)))
    thread.start()
    nonces = theirs.recv(100).strip() + b" 1111"
    theirs.sendall(b"1111 " + KEY.mac("channel", nonces) + b"\n")
    thread.join()
    (client,) = answer
    with pytest.raises(TimeoutError):
        client.hear(0.01)
    sealed = KEY.mac("server", nonces, b"1", b'{"kind": "end"}')
    theirs.sendall(sealed + b' {"kind": "end"}\n' + sealed + b' {"kind": "end"}\n')
    assert client.hear(scaled(5)) == {"kind": "end"}
    with pytest.raises(ValueError, match="not sealed"):
        client.hear(scaled(5))
    theirs.close()
    with pytest.raises(ConnectionError):
        client.hear(scaled(5))


def test_who_says_nothing_is_dropped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it has begun as a task does; not a task that has said who it is."""
    monkeypatch.setattr(channel_server, "_HELLO_S", 0.3)
    client = Client(job.connect(), KEY)
    client.say("hello")
    silent, half = job.connect(), job.connect()
    half.sendall(b"0123\n")
    for stranger in (silent, half):
        while stranger.recv(1000):
            pass
    client.say("ended")
    assert [job.next()["kind"] for _ in range(2)] == ["hello", "ended"]


def test_strangers_do_not_take_all_open_files(job: Job) -> None:
    """Any user of the cluster can connect, as often as it likes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = Client(job.connect(), KEY)
    before.say("hello", number=1)
    assert job.next()["number"] == 1
    crowd = subprocess.Popen([sys.executable, "-c", CROWD, str(job.server.port)], stdout=subprocess.PIPE)
    try:
        assert crowd.stdout is not None and crowd.stdout.readline()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 10, limits[1]))
        with contextlib.suppress(OSError):  # this process needs one for itself
            late = Client(job.connect(), KEY, timeout_s=scaled(5))
            late.say("hello", number=2)
            assert job.next()["number"] == 2
        before.say("ended", number=3)
        assert job.next()["number"] == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        crowd.kill()
        crowd.communicate()


CROWD = """import socket, sys, time
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(200)]
print("there", flush=True)
time.sleep(600)
"""


def test_many_tasks_are_heard_at_once(job: Job) -> None:
    def say(number: int) -> None:
        client = Client(job.connect(), KEY, timeout_s=scaled(20))
        client.say("hello", number=number)
        client.close()

    callers = [threading.Thread(target=say, args=(number,)) for number in range(200)]
    for caller in callers:
        caller.start()
    heard = sorted(job.heard.get(timeout=scaled(LIMIT_S))["number"] for _ in callers)
    assert heard == list(range(200))
    for caller in callers:
        caller.join()


def test_a_job_that_is_gone_costs_a_task_nothing() -> None:
    one = Job()
    client = Client(one.connect(), KEY)
    one.server.close()
    for _ in range(3):
        client.say("ended", words="x" * 100_000)
    client.close()


def test_the_first_free_port_of_the_range_is_taken() -> None:
    with channel_server.listen([]) as held:
        taken = held.getsockname()[1]
        with channel_server.listen([taken]) as other, channel_server.listen([0]) as free:
            assert other.getsockname()[1] != taken
            number = free.getsockname()[1]
        with channel_server.listen([taken, number]) as second:
            assert second.getsockname()[1] == number
