"""How the ranks' reports reach rank 0, and its instructions reach them, on a cluster where anything may be broken.

Rank 0 listens on a candidate port of the topology, the port that the training would take. The others connect to it by
the agent's channel, say at once that they are here, and then send a message for each tier. Until they are connected
they write their last message to a file. So this is a test itself: a report that comes as a file only is from a rank
that does not reach the master's port.

A message's kind is its tier; a report has also the rank, the host and the id of its process.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from cluster_ddp import processes
from cluster_ddp.agent.channel import Client, Key, Message
from cluster_ddp.agent.channel_server import Server
from cluster_ddp.doctor.step import connecting
from cluster_ddp.doctor.step.report_folder import ReportFolder
from cluster_ddp.errors import RendezvousError
from cluster_ddp.runtime.rendezvous import host_setup
from cluster_ddp.slurm.topology import Topology

_POLL_S = 0.1
# How long the others may take to read the last message: a busy node stops a process for seconds.
_READ_S = 30.0
_LONGEST_PAUSE_S = 1.0
# How much later than the others rank 0 may take its own start.
_GRACE_S = 2.0


class ReportServer:
    """Rank 0's side: it collects the messages of all ranks and answers all.

    Without a `topology`, as in an environment that contradicts itself, it only reads the files in `folder`, which are
    the reports that could not be sent.
    """

    def __init__(self, topology: Topology | None, key: Key, folder: ReportFolder) -> None:
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
                self._server = Server(host_setup.bind_first_free(topology), key, self._hear, self._gone)
            except RendezvousError as error:
                self.port_error = error

    def put(self, message: Message) -> None:
        """Add a rank's message; with any, the rank is "here". If another process has sent one as this rank, note it."""
        tier, rank = str(message["kind"]), int(message["rank"])
        with self._news:
            self._received.setdefault("here", {}).setdefault(rank, message)
            before = self._received.setdefault(tier, {}).setdefault(rank, message)
            if before.get("id") != message.get("id"):
                self.twice.setdefault(rank, [str(one.get("host")) for one in (before, message)])
            elif before.get("by") != "tcp":
                self._received[tier][rank] = message
            self._news.notify_all()

    def gather(self, tier: str, ranks: int, timeout_s: float) -> dict[int, Message]:
        """Wait for the messages of so many ranks, but not of those whose connection has ended. Returns them by rank.

        The tier "here" is of any message.
        """

        def are_all_here() -> bool:
            found = self._received.get(tier, {})
            return len(found) + len(self.closed - found.keys()) >= ranks

        return self._wait(are_all_here, timeout_s, tier)

    def settle(self, tier: str, settle_s: float, limit_s: float) -> dict[int, Message]:
        """Wait until the ranks whose messages are known by a file have connected, or have surely failed to.

        For that rank 0 must have listened `settle_s` seconds. Where packets get lost, a try takes longer: wait at most
        `limit_s` from now on. Returns the messages by rank.
        """
        begun: dict[int, int] = {}

        def has_tried(rank: int, one: Message) -> bool:
            failures, tries = one.get("failures"), int(one.get("tries", 0))
            if failures is None or set(failures.values()) - {connecting.REFUSED}:
                return True
            # Before rank 0 listened, its host refused all: a whole try must lie after that.
            return bool(failures) and tries >= begun.setdefault(rank, tries) + 2

        def is_settled() -> bool:
            found = list(self._received.get(tier, {}).items())
            apart = [has_tried(rank, one) for rank, one in found if one.get("by") == "file"]
            have_tried = all(apart) and time.monotonic() > self._begun + settle_s
            return not apart or have_tried or self._server is None

        return self._wait(is_settled, limit_s, tier)

    def tell(self, tier: str, **fields: object) -> None:
        """Send a message to all ranks; the last one, "end", also by a file."""
        if self._server is not None:
            self._server.tell(tier, **fields)
        if tier == "end":
            self._folder.write_report({"kind": tier, **fields})

    def close(self) -> None:
        """Wait until all have the last message: they remove their file, or close their connection. Then close all."""

        def have_ended() -> bool:
            found = [one for tier in self._received.values() for one in tier.items()]
            connected = {rank for rank, message in found if message.get("by") == "tcp"}
            return connected <= self.closed and not self._folder.report_files()

        self._wait(have_ended, _READ_S)
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
            for report in self._folder.reports():
                self.put({**report, "by": "file"})
            with self._news:
                if condition() or time.monotonic() > deadline:
                    break
                self._news.wait(_POLL_S)
        with self._news:
            return dict(self._received.get(tier, {}))


class ReportClient:
    """Another rank's side: it sends its reports to rank 0, whose start it awaits `wait_s` seconds, and hears from it.

    Without a `topology`, as in an environment that contradicts itself, it only writes a file in `folder`.
    """

    def __init__(self, topology: Topology | None, key: Key, folder: ReportFolder, wait_s: float) -> None:
        self._topology = topology
        self._key, self._folder, self._start_by = key, folder, time.monotonic() + wait_s + _GRACE_S
        self._client: Client | None = None
        self._last: Message = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.failures: dict[str, str] = {}
        """Port of rank 0 -> how the connection failed."""
        self._tries = 0
        self.was_closed = False
        """Whether rank 0's host has closed the connection: then it can be reached, and rank 0 has ended."""

    @property
    def is_connected(self) -> bool:
        """Whether it has reached rank 0."""
        return self._client is not None

    def start(self, here: Message) -> None:
        """Say that this rank is here, and try to reach rank 0 from now on. Call it once."""
        self.send(here)
        if self._topology is not None:
            processes.start_thread(self._reach, "doctor")

    def send(self, message: Message) -> None:
        """Send a message to rank 0; without a connection, write it to a file, and send it once there is one."""
        with self._lock:
            self._last = message
            self._send_last(self._client)

    def told(self, timeout_s: float, *, unseen_s: float | None = None) -> Message | None:
        """Wait for rank 0's next message; without a connection, for its last. None if none comes.

        While nothing shows that rank 0 has started, wait `unseen_s` only; default: until `wait_s` after our own start.
        """
        now = time.monotonic()
        deadline, start_by = now + timeout_s, self._start_by if unseen_s is None else now + unseen_s
        while time.monotonic() < (deadline if self.is_connected or self._folder.is_led() else min(deadline, start_by)):
            if self._client is not None:
                try:
                    return self._client.hear(deadline - time.monotonic())
                except (OSError, ValueError) as error:
                    self.was_closed = isinstance(error, ConnectionError)
                    if not self.was_closed:
                        return None
                    time.sleep(_POLL_S)
                    if not self._connects():  # short of open files, rank 0 closes those that have said nothing yet
                        return None
            if end := self._folder.end():
                return end
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """Close the connection; remove the file: rank 0 waits for that."""
        self._closed.set()
        with self._lock:
            if self._last:
                self._folder.remove_report(self._last)
            if self._client is not None:
                self._client.close()

    def _reach(self) -> None:
        """Connect to rank 0, which may start later than this rank."""
        pause_s = _POLL_S
        while not self._closed.is_set() and time.monotonic() < self._start_by and not self._connects():
            with self._lock:
                if self._closed.is_set():
                    return
                self._tries += 1
                self._send_last(None)
            self._closed.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)

    def _connects(self) -> bool:
        """Try once to connect to rank 0, and send it the last message. Returns whether it was reached."""
        client = self._connected()
        with self._lock:
            if client is not None and not self._closed.is_set():
                self._send_last(client)
                self._client = client
        return client is not None

    def _connected(self) -> Client | None:
        assert self._topology is not None
        host = host_setup.LOOPBACK if self._topology.num_nodes == 1 else self._topology.master_addr
        for port in self._topology.port_candidates:
            try:
                return connecting.several_tries(functools.partial(connecting.greet, host, port, self._key))
            except OSError as error:
                kind = self.failures[str(port)] = connecting.kind_of(error)
                if kind not in (connecting.REFUSED, connecting.NO_ANSWER, connecting.HELD):
                    break  # the other ports would not answer either
        return None

    def _send_last(self, client: Client | None) -> None:
        if client is None:
            failures = None if self._topology is None else dict(self.failures)
            self._folder.write_report({**self._last, "failures": failures, "tries": self._tries})
        else:
            client.say(**self._last, sent_at=time.time())  # `told` notices that it is closed
            self._folder.remove_report(self._last)
