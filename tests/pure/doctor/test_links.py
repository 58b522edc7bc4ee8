"""What a node measures on the way to another."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from cluster_ddp.doctor.step import judgement, links


def measured(monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float]) -> links.Link:
    """A link whose pieces take so long, by a clock of its own."""
    clock, each = SimpleNamespace(now=0.0), iter(seconds)

    def timed(connection: object, mode: int, data: bytes) -> float:
        if mode == links._SINK:
            clock.now += next(each)
        return 0.0001

    monkeypatch.setattr(links, "_timed", timed)
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: clock.now))
    listener = links.Listener()
    try:
        return links.measure("node1", "node2", "127.0.0.1", listener.port)
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        (itertools.cycle([0.002, 0.3, 0.002]), []),  # some pieces wait for a core that others compute on
        (itertools.cycle([0.02]), ["node1 -> node2 52 MB/s."]),
        (itertools.chain([0.02] * 51, itertools.cycle([0.002])), []),  # busy for a second
        # A policer lets a second's worth pass at once.
        (itertools.chain([0.004] * 10, itertools.cycle([0.4])), ["node1 -> node2 3 MB/s."]),
    ],
    ids=["busy cores", "slow", "slow for a second", "slow after a burst"],
)
def test_a_link_is_slow_by_most_of_its_pieces(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float], slow: list[str]
) -> None:
    assert [found.evidence for found in judgement.of_links([measured(monkeypatch, seconds)])] == slow


def test_a_process_that_waits_for_a_core_is_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver reads each piece 30 ms late: at most 35 MB/s, whatever the link can do."""
    received = links._exactly

    def late(connection: socket.socket, size: int) -> bytes:
        if size == links._CHUNK:
            time.sleep(0.03)
        return received(connection, size)

    monkeypatch.setattr(links, "_exactly", late)
    listener = links.Listener()
    try:
        link = links.measure("node1", "node2", "127.0.0.1", listener.port)
    finally:
        listener.close()
    assert link.bytes_per_s is not None
    assert judgement.of_links([link]) == []
