"""A job's side of the channel, for what its tasks say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from cluster_ddp.agent import channel_server
from cluster_ddp.agent.channel import Key, Message
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.agent.rank_end import End

SECRET = "5e" * 32


class Listening(NamedTuple):
    """What is heard."""

    server: Server
    env: dict[str, str]
    """By which a task finds it."""
    said: list[Message]
    gone: list[Message]

    def ends(self) -> list[End]:
        """How the ranks have ended, once all connections have."""
        self.server.drain(10)
        return [End(**{name: one[name] for name in End._fields}) for one in self.said if one["kind"] == "ended"]


@contextlib.contextmanager
def listening() -> Iterator[Listening]:
    """Listen on this machine."""
    said: list[Message] = []
    gone: list[Message] = []
    server = Server(channel_server.listen_here(), Key.of_job({"CLUSTER_DDP_SECRET": SECRET}), said.append, gone.append)
    with contextlib.closing(server):
        env = {"CLUSTER_DDP_CHANNEL": f"127.0.0.1:{server.port}", "CLUSTER_DDP_SECRET": SECRET}
        yield Listening(server, env, said, gone)
