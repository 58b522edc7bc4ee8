"""Ranks agree at the same steps, about once a second."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster_ddp.runtime import exchange as exchange_module
from cluster_ddp.runtime.exchange import Exchange


class Ranks:
    """Threads that play ranks, each with a clock of its own; all_reduce is the maximum, once all are there."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch) -> None:
        self.count, self.mine = count, threading.local()
        self.barrier, self.values = threading.Barrier(count, timeout=20), [torch.empty(0)] * count
        patch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: self.mine.now))
        fake = SimpleNamespace(all_reduce=self.all_reduce, ReduceOp=torch.distributed.ReduceOp)
        patch.setattr(exchange_module, "dist", fake)

    def all_reduce(self, values: torch.Tensor, op: object) -> None:
        assert op == torch.distributed.ReduceOp.MAX and values.device.type == "cpu"
        self.values[self.mine.rank] = values.clone()
        self.barrier.wait()
        values.copy_(torch.stack(self.values).amax(0))
        self.barrier.wait()

    def run(self, play: Any) -> list[Any]:
        results: list[Any] = [None] * self.count

        def main(rank: int) -> None:
            self.mine.rank, self.mine.now = rank, 1000.0 * rank
            results[rank] = play(rank)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_the_exchange_is_about_once_a_second_at_the_same_steps_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 milliseconds, then, from step 5000 on, of half a second on rank 1."""
    ranks = Ranks(3, monkeypatch)

    def play(rank: int) -> list[int]:
        exchange, at = Exchange(SimpleNamespace(world_size=3)), []  # type: ignore[arg-type]
        for step in range(1, 6001):
            ranks.mine.now += 0.5 if rank == 1 and step > 5000 else 0.02 * (rank + 1) / 3
            if exchange.is_due():
                exchange.any(False)
                at.append(step)
        return at

    at, *others = ranks.run(play)
    assert others == [at, at]
    gaps = [later - sooner for sooner, later in itertools.pairwise(at)]
    assert gaps[0] <= 2 and all(after <= 2 * before for before, after in itertools.pairwise(gaps))
    quick = [gap for step, gap in zip(at, gaps) if 2100 < step < 3900]
    assert quick and all(45 <= gap <= 51 for gap in quick)
    assert gaps[-1] == 2  # a second of slow steps


def test_one_ranks_flag_is_all_ranks_and_flags_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, monkeypatch)

    def play(rank: int) -> list[list[bool]]:
        exchange = Exchange(SimpleNamespace(world_size=3))  # type: ignore[arg-type]
        found = []
        for stop, over in [(False, False), (rank == 2, False), (False, rank == 0), (rank == 1, rank == 2)]:
            ranks.mine.now += 1e4 * (rank == 0)  # however long the step was
            found.append(exchange.any(stop, over))
        return found

    assert ranks.run(play) == [[[False, False], [True, False], [False, True], [True, True]]] * 3


def test_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "dist", None)
    exchange = Exchange(SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    assert exchange.is_due()
    assert exchange.any(True, False) == [True, False]
