"""Rank 0's side of the exchange: it collects messages of all ranks and answers all."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cluster_ddp.agent.channel.lines import Message
from cluster_ddp.agent.channel.server import Server
from cluster_ddp.agent.secret import Key
from cluster_ddp.doctor.step import exchange
from cluster_ddp.errors import RendezvousError
from cluster_ddp.files import atomic_write
from cluster_ddp.runtime.rendezvous import host_network
from cluster_ddp.slurm.topology import Topology

# How long those that read files may take to read the last message.
_READ_S = 3.0


class Hub:
    """Rank 0's side: it collects messages of all ranks and answers all.

    Args:
        topology: of rank 0; None if its environment contradicts itself: then it only reads files.
        key: the key of this run.
        folder: where reports lie that could not be sent; None if it can't be made.
    """

    def __init__(self, topology: Topology | None, key: Key, folder: Path | None) -> None:
        self._folder, self._begun = folder, time.monotonic()
        self._received: dict[str, dict[int, Message]] = {}
        self.closed: set[int] = set()
        """Ranks whose connection has ended: their hosts can be reached."""
        self._news = threading.Condition()
        self.twice: dict[int, list[str]] = {}
        """Ranks that several processes claim to be -> their hosts."""
        self.port_error: RendezvousError | None = None
        """Why rank 0 can't listen; None if it does."""
        self._server: Server | None = None
        if topology is not None and topology.world_size > 1:
            try:
                listener = host_network.bind_first_free(topology)
                self._server = Server(listener, key, self._hear, self._gone)
            except RendezvousError as error:
                self.port_error = error

    def put(self, message: Message) -> None:
        """Add a rank's message; with any, the rank is "here". If another process has sent one as this rank, note it."""
        tier, rank = str(message["kind"]), int(message["rank"])
        with self._news:
            self._received.setdefault("here", {}).setdefault(rank, message)
            before = self._received.setdefault(tier, {}).setdefault(rank, message)
            if before.get("id") != message.get("id"):
                hosts = [str(one.get("host")) for one in (before, message)]
                self.twice.setdefault(rank, hosts)
            elif before.get("by") != "tcp":
                self._received[tier][rank] = message
            self._news.notify_all()

    def gather(self, tier: str, ranks: int, timeout_s: float) -> dict[int, Message]:
        """Wait for the messages of all ranks but those whose connection has ended.

        Args:
            tier: which message; "here" for any.
            ranks: number of ranks.
            timeout_s: seconds to wait.

        Returns:
            Rank -> its message.
        """

        def are_all_here() -> bool:
            found = self._received.get(tier, {})
            return len(found) + len(self.closed - found.keys()) >= ranks

        return self._wait(are_all_here, timeout_s, tier)

    def settle(self, tier: str, settle_s: float) -> dict[int, Message]:
        """Wait until the ranks whose messages are known by a file have connected, or have surely failed to.

        Args:
            tier: which message.
            settle_s: seconds that rank 0 must have listened for that; five times as long is enough where packets get
                lost.

        Returns:
            Rank -> its message.
        """

        begun: dict[int, int] = {}

        def has_tried(rank: int, one: Message) -> bool:
            failures, tries = one.get("failures"), int(one.get("tries", 0))
            if failures is None or set(failures.values()) - {exchange.REFUSED}:
                return True
            # Before rank 0 listened, its host refused all: a whole try must lie after that.
            return bool(failures) and tries >= begun.setdefault(rank, tries) + 2

        def is_settled() -> bool:
            found = list(self._received.get(tier, {}).items())
            apart = [has_tried(rank, one) for rank, one in found if one.get("by") == "file"]
            have_tried = all(apart) and time.monotonic() > self._begun + settle_s
            return not apart or have_tried or self._server is None

        return self._wait(is_settled, max(0.0, self._begun + 5 * settle_s - time.monotonic()), tier)

    def tell(self, tier: str, **fields: object) -> None:
        """Send a message to all ranks; the last one, "end", also by a file."""
        if self._server is not None:
            self._server.tell(tier, **fields)
        if self._folder is not None and tier == "end":
            with contextlib.suppress(OSError), atomic_write(self._folder / exchange.LAST) as file:
                file.write(json.dumps({"kind": tier, **fields}).encode())

    def close(self) -> None:
        """Wait until those that read files have read the last message, and close all connections."""
        self._wait(lambda: self._folder is None or not any(self._folder.glob(f"{exchange.REPORT}*")), _READ_S)
        if self._server is not None:
            self._server.close()

    def _hear(self, message: Message) -> None:
        self.put({**message, "by": "tcp", "received_at": time.time()})

    def _gone(self, message: Message) -> None:
        with self._news:
            self.closed.add(int(message["rank"]))
            self._news.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, tier: str = "") -> dict[int, Message]:
        """Wait, and read files meanwhile. Returns the messages of a tier."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._read_files()
            with self._news:
                if condition() or time.monotonic() > deadline:
                    break
                self._news.wait(exchange.POLL_S)
        with self._news:
            return dict(self._received.get(tier, {}))

    def _read_files(self) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{exchange.REPORT}*.json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    self.put({**json.loads(path.read_text()), "by": "file"})
