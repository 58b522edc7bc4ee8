"""runtime.fork.warm_rank: the line that names the next rank's command. test_warm_process.py starts real processes."""

from __future__ import annotations

import socket
import threading

import pytest

from cluster_ddp.runtime.fork import warm_rank


def test_a_line_that_comes_in_pieces_is_heard_whole() -> None:
    """It may be longer than a socket takes at once."""
    agent, rank = socket.socketpair()
    with agent, rank:
        agent.sendall(b'{"words": ["a')
        threading.Timer(0.1, agent.sendall, [b'"]}\n']).start()
        assert warm_rank._heard(rank) == {"words": ["a"]}


def test_an_agent_that_ends_in_the_middle_of_a_line_ends_the_rank() -> None:
    agent, rank = socket.socketpair()
    with agent, rank:
        agent.sendall(b'{"words"')
        agent.close()
        with pytest.raises(SystemExit):
            warm_rank._heard(rank)
