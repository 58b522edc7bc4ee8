"""What a node measures on the way to another."""

from __future__ import annotations

import itertools

import pytest

from cluster_ddp.doctor.step import links


def test_pieces_that_wait_for_a_core_do_not_make_a_link_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.cycle([0.002, 0.3, 0.002])
    monkeypatch.setattr(links, "_timed", lambda connection, mode, data: next(seconds))
    listener = links.Listener()
    try:
        link = links.measure("node1", "node2", "127.0.0.1", listener.port)
        assert not links.judge([link]), link
        seconds = itertools.cycle([0.02])
        link = links.measure("node1", "node2", "127.0.0.1", listener.port)
    finally:
        listener.close()
    assert [found.evidence for found in links.judge([link])] == ["node1 -> node2 52 MB/s."]
