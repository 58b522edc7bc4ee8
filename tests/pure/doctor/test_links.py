"""What a node measures on the way to another."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from cluster_ddp.doctor.step import judgement, links


def measured(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float], core_waits: Iterable[float] = itertools.repeat(0.0)
) -> links.NetworkLink:
    """A link whose pieces take so long, by a clock of its own; for a part the other end waits for a core."""
    clock, each = SimpleNamespace(now=0.0, waited=0.0), zip(seconds, core_waits)

    def send_piece(connection: object) -> int:
        took, waited = next(each)
        clock.now += took
        clock.waited += waited
        return int(clock.waited * 1e9)

    monkeypatch.setattr(links, "_timed", lambda connection, data: 0.0001)
    monkeypatch.setattr(links, "_send_piece", send_piece)
    monkeypatch.setattr(links, "_waited_ns", lambda: 0)
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: clock.now))
    listener = links.Listener()
    try:
        return links.measure("node1", "node2", "127.0.0.1", listener.port)
    finally:
        listener.close()


BURSTS = [0.002, 0.3, 0.002]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        (itertools.cycle([0.02]), ["node1 -> node2 52 MB/s."]),
        (itertools.chain([0.02] * 51, itertools.cycle([0.002])), []),  # busy for a second
        # A policer lets a second's worth pass at once.
        (itertools.chain([0.004] * 10, itertools.cycle([0.4])), ["node1 -> node2 3 MB/s."]),
        (itertools.cycle(BURSTS), ["node1 -> node2 10 MB/s."]),  # and some after each pause for what it dropped
    ],
    ids=["slow", "slow for a second", "slow after a burst", "slow in bursts"],
)
def test_a_link_is_slow_by_what_passes_in_its_time(
    monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float], slow: list[str]
) -> None:
    assert [found.evidence for found in judgement.of_links([measured(monkeypatch, seconds)])] == slow


def test_pieces_that_wait_for_a_core_make_no_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = measured(monkeypatch, itertools.cycle([0.02]), itertools.cycle([0.009]))
    assert not judgement.of_links([link])
    assert link.bytes_per_s == pytest.approx(52e6, rel=0.1)


def test_a_link_whose_ends_waited_most_of_the_time_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's work on packets has waited, too, and nobody counts that."""
    link = measured(monkeypatch, itertools.cycle(BURSTS), itertools.cycle([0.0, 0.298, 0.0]))
    assert not judgement.of_links([link])
    assert (link.bytes_per_s, link.failure) == (None, None)


SHARED_CORE = """
import os, subprocess, sys
from cluster_ddp.doctor.step import judgement, links
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
os.nice(15)
try:
    link = links.measure("node1", "node2", "127.0.0.1", links.Listener().port)
    print([found.evidence for found in judgement.of_links([link])], link)
finally:
    for other in others:
        other.kill()
"""


def test_processes_that_wait_for_a_core_are_no_slow_link() -> None:
    """Both ends share one with four others that compute, and are the least important."""
    done = subprocess.run([sys.executable, "-c", SHARED_CORE], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] "), done.stdout


def test_a_link_is_slower_than_others_if_it_is_so_without_the_waits_for_cores() -> None:
    """Those of the others count: nodes are busy in different ways."""
    rates = {"node1": (200e6, 2e9), "node2": (900e6, 5e11), "node3": (1e9, 1e9), "node4": (100e6, 200e6)}
    found = [
        links.NetworkLink(source=node, target="node5", bytes_per_s=rate, at_most_bytes_per_s=at_most)
        for node, (rate, at_most) in rates.items()
    ]
    assert judgement.of_links(found) == []
    (slow,) = judgement.of_links(found[1:])
    assert slow.evidence == "node4 -> node5 100 MB/s; the median of all links is 900 MB/s."
