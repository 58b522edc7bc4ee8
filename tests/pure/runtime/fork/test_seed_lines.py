"""runtime.fork.seed: the line that asks for a rank. tests/ranks/agent/task/test_seed.py starts real processes."""

from __future__ import annotations

import socket
import threading

from cluster_ddp.runtime.fork import seed


def test_a_line_that_comes_in_pieces_is_heard_whole() -> None:
    """It may be longer than a socket takes at once."""
    agent, rank = socket.socketpair()
    with agent, rank:
        agent.sendall(b'{"words": ["a')
        threading.Timer(0.1, agent.sendall, [b'"]}\n']).start()
        assert seed._heard(rank) == ({"words": ["a"]}, [])


def test_an_agent_that_ends_in_the_middle_of_a_line_asks_for_nothing() -> None:
    agent, rank = socket.socketpair()
    with agent, rank:
        agent.sendall(b'{"words"')
        agent.close()
        assert seed._heard(rank) is None
