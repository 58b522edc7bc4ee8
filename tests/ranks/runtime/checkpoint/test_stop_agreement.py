"""Ranks agree at the same steps, about twice a second, and no step waits for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slowness import LIMIT_S, scaled

from cluster_ddp.runtime.checkpoint import stop_agreement as agreement_module
from cluster_ddp.runtime.checkpoint.stop_agreement import AGREE_EVERY_S, StopAgreement


class Work:
    """An all-reduce that was begun: its end is waited for, and takes time on the rank's clock if it was begun late."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


@pytest.fixture(autouse=True)
def as_it_was() -> None:
    """Here the ranks agree as seldom as they do."""


class Ranks:
    """Threads that play ranks, each with a clock of its own; all_reduce is the maximum, once all have begun it."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch, *, takes_s: float = 0.0) -> None:
        self.count, self.takes_s, self.mine = count, takes_s, threading.local()
        self.lock, self.begun = threading.Condition(), [[torch.empty(0)] * 0 for _ in range(10_000)]
        patch.setattr(agreement_module, "time", SimpleNamespace(monotonic=lambda: self.mine.now))
        fake = SimpleNamespace(all_reduce=self.all_reduce, ReduceOp=torch.distributed.ReduceOp, Work=Work)
        patch.setattr(agreement_module, "dist", fake)
        patch.setattr(torch.distributed, "is_initialized", lambda: True)

    def all_reduce(self, values: torch.Tensor, op: object, async_op: bool) -> Work:
        assert op == torch.distributed.ReduceOp.MAX and values.device.type == "cpu" and async_op
        number, self.mine.number = self.mine.number, self.mine.number + 1
        with self.lock:
            self.begun[number].append(values.clone())
            self.lock.notify_all()
        ends = self.mine.now + self.takes_s

        def wait() -> None:
            with self.lock:
                assert self.lock.wait_for(lambda: len(self.begun[number]) == self.count, timeout=scaled(LIMIT_S))
                values.copy_(torch.stack(self.begun[number]).amax(0))
            self.mine.now = max(self.mine.now, ends)

        return Work(wait)

    def run(self, play: Any) -> list[Any]:
        results: list[Any] = [None] * self.count

        def main(rank: int) -> None:
            self.mine.rank, self.mine.now, self.mine.number = rank, 1000.0 * rank, 0
            results[rank] = play(rank)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def exchanges_of(ranks: Ranks, step_s: Callable[[int, int], float], steps: int) -> list[int]:
    """The steps after which the ranks exchange flags, the same on all."""

    def play(rank: int) -> list[int]:
        exchange, at = StopAgreement(SimpleNamespace(world_size=3, rank=rank)), []  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            ranks.mine.now += step_s(rank, step)
            if exchange.is_due():
                exchange.collect(False)
                exchange.begin(False)
                at.append(step)
        exchange.finish()
        return at

    at, *others = ranks.run(play)
    assert others == [at, at]
    return [later - sooner for sooner, later in itertools.pairwise([0, *at])]


def test_the_exchange_is_at_the_same_steps_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 milliseconds, then, from step 5000 on, of a quarter of a second on rank 1."""

    def step_s(rank: int, step: int) -> float:
        return 0.25 if rank == 1 and step > 5000 else 0.02 * (rank + 1) / 3

    gaps = exchanges_of(Ranks(3, monkeypatch), step_s, 6000)
    assert gaps[0] == 1 and all(after <= 2 * before for before, after in itertools.pairwise(gaps))
    starts = itertools.accumulate(gaps)
    quick = [gap for step, gap in zip(starts, gaps) if 2100 < step < 3900]
    assert quick and all(0.9 * AGREE_EVERY_S <= 0.02 * gap <= 1.02 * AGREE_EVERY_S for gap in quick)
    assert gaps[-1] == 2  # half a second of slow steps


@pytest.mark.parametrize(("takes_s", "every_s"), [(0.2, 0.5), (1.5, 1.5), (60, 4)])
def test_where_an_exchange_takes_long_it_is_made_less_often_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, every_s: float
) -> None:
    gaps = exchanges_of(Ranks(3, monkeypatch, takes_s=takes_s), lambda rank, step: 0.1, 2000)
    mean = sum(gaps[-20:]) / 20
    assert 0.6 * every_s <= 0.1 * mean <= 1.4 * every_s


def test_no_step_waits_for_an_exchange_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, monkeypatch, takes_s=0.4)

    def play(rank: int) -> float:
        exchange = StopAgreement(SimpleNamespace(world_size=3, rank=rank))  # type: ignore[arg-type]
        waited = 0.0
        for step in range(1000):
            ranks.mine.now += 0.01
            start = ranks.mine.now
            if exchange.is_due():
                exchange.collect(False)
                exchange.begin(False)
            waited += (ranks.mine.now - start) if step > 500 else 0
        return waited

    assert max(ranks.run(play)) < 0.01


def test_one_ranks_flag_is_all_ranks_and_flags_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun with is collected at the next exchange; only the first one tells what is now."""
    ranks = Ranks(3, monkeypatch)

    def play(rank: int) -> list[list[bool]]:
        exchange = StopAgreement(SimpleNamespace(world_size=3, rank=rank))  # type: ignore[arg-type]
        found = []
        for stop, over in [(rank == 1, False), (rank == 2, False), (False, rank == 0), (rank == 1, rank == 2)]:
            ranks.mine.now += 1e4 * (rank == 0)  # however long the step was
            found.append(exchange.collect(stop, over))
            exchange.begin(stop, over)
        exchange.finish()
        return found

    assert ranks.run(play) == [[[True, False], [True, False], [True, False], [False, True]]] * 3


def test_what_a_step_costs_each_rank_is_exchanged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, monkeypatch)

    def play(rank: int) -> list[list[float]]:
        exchange, found = StopAgreement(SimpleNamespace(world_size=3, rank=rank)), []  # type: ignore[arg-type]
        for step in range(3):
            exchange.collect(False, own_s=0.0)
            found.append(exchange.own_s_of_ranks)
            exchange.begin(False, own_s=0.1 * rank + step)
        exchange.finish()
        return [*found, exchange.own_s_of_ranks]

    expected = [[0.0, 0.0, 0.0], [0.0, 0.1, 0.2], [1.0, 1.1, 1.2], [2.0, 2.1, 2.2]]
    assert ranks.run(play) == [expected] * 3


def test_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement_module, "dist", None)
    exchange = StopAgreement(SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    for _ in range(3):
        assert exchange.is_due()
        assert exchange.collect(True, False) == [True, False]
        exchange.begin(True, False)
    exchange.finish()
