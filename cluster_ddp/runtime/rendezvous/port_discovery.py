"""The beacon: it tells the port of rank 0's store to the ranks of the run, and to nobody else.

Rank 0 runs it on the first of the topology's candidate ports that it can bind, over the agent's channel. The other
ranks try the candidates one after the other until one proves to be their own beacon. A candidate that another program
holds costs a fraction of a second, whether that is another job of ours, a web server, or a socket that accepts and
stays silent. (A TCPStore client waits forever on such a socket, whatever its timeout: seen with torch 2.15.)

Without the run's key one learns only random numbers, and a recorded exchange is useless later. A stranger that relays
all messages learns the port, but cannot change it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping

from cluster_ddp.agent.channel import Client, Key
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.topology import Topology

_PURPOSE = "port"
_FIRST_PATIENCE_S, _LAST_PATIENCE_S = 0.25, 5.0
# How long an answer of the beacon may take if many ask at once. A rank that gives up early asks again and adds load.
_PATIENCE_PER_RANK_S = 0.001
_NOBODY = os.strerror(errno.ECONNREFUSED).lower()
# If nobody listens on a port, rank 0 has most likely not started: the ports after it are tried only now and then, since
# many ranks may wait.
_ASK_ALL_EVERY = 3
# Limits the rounds of all waiting ranks together to 50,000 a second.
_FIRST_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 2e-5
# How many besides the ranks may be connected at once.
_STRANGERS = 64


def run_key(topology: Topology, env: Mapping[str, str]) -> Key:
    """Return the key that only the ranks of one run have: it differs from those of the job's other steps.

    It is made of the secret in `env` (`Env.SECRET`); for a run of one process it is random.
    """
    if topology.world_size == 1:
        return Key(os.urandom(32))
    return Key(os.fsencode(env.get(Env.SECRET, "")), topology.key)


@contextlib.contextmanager
def answering(listener: socket.socket, key: Key, store_port: int, ranks: int) -> Iterator[None]:
    """During the body, tell the store's port to everyone who connects and proves to have the key.

    The listener is closed at the end. `ranks` is the number of ranks that may connect at once.
    """
    answer, most = {"kind": _PURPOSE, "port": store_port}, ranks + _STRANGERS
    own = key.derived(_PURPOSE)
    with contextlib.closing(Server(listener, own, lambda question: answer, lambda hello: None, most_strangers=most)):
        yield


def find_store(topology: Topology, key: Key, address: str, deadline: float) -> tuple[int | None, str]:
    """Try the candidate ports of rank 0's host, of a numeric address, until our own beacon answers.

    Args:
        deadline: when to give up, on the clock of time.monotonic().

    Returns:
        The store's port, or None if no beacon of this run answered; and the last answer on each port, in words.
    """
    patience_s = min(_LAST_PATIENCE_S, _FIRST_PATIENCE_S + _PATIENCE_PER_RANK_S * topology.world_size)
    heard: dict[int, str] = {}
    rounds = 0
    while True:
        rounds += 1
        for port in topology.port_candidates:
            answer = _ask(address, port, key, min(patience_s, max(0.1, deadline - time.monotonic())))
            if isinstance(answer, int):
                return answer, ""
            heard[port] = answer
            if answer == _NOBODY and rounds % _ASK_ALL_EVERY:
                break
        if time.monotonic() > deadline:
            return None, ", ".join(f"{port}: {answer or 'silence'}" for port, answer in heard.items())[:400]
        pause_s = _FIRST_PAUSE_S + patience_s / 10 + _PAUSE_PER_RANK_S * topology.world_size
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic()) + 0.01))
        patience_s = min(1.5 * patience_s, _LAST_PATIENCE_S)


def _ask(address: str, port: int, key: Key, patience_s: float) -> int | str:
    """The store's port if our beacon is on this port; else what its holder says. Takes `patience_s` seconds at most."""
    deadline = time.monotonic() + patience_s
    try:
        connection = socket.create_connection((address, port), patience_s)
        with contextlib.closing(Client(connection, key.derived(_PURPOSE), _left_s(deadline))) as client:
            client.say(_PURPOSE)
            return int(client.hear(_left_s(deadline))["port"])
    except (TimeoutError, ValueError):  # ValueError: the answer was changed on its way
        return ""
    except OSError as error:
        return error.strerror.lower() if error.strerror else str(error)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
