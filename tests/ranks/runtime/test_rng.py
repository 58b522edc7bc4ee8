"""The generators go on from where they were; what they draw is the witness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from cluster_ddp.runtime import rng
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy
from cluster_ddp.runtime.rng import seed_all

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng.capture([CPU])
    yield
    rng.restore(before, [CPU])


def draw() -> list[float]:
    """Some of everything, with the normal ones, of which Python and NumPy keep a second for later."""
    torch_values = [*torch.rand(3).tolist(), torch.randn(()).item(), *torch.randperm(5).tolist()]
    return [
        *torch_values,
        random.random(),
        random.gauss(0, 1),
        *numpy.random.rand(2).tolist(),
        float(numpy.random.randn()),
        float(numpy.random.randint(1 << 30)),
    ]


@pytest.mark.parametrize("draws_before", [0, 1, 2, 700])
def test_the_same_is_drawn_after_a_checkpoint(tmp_path: Path, draws_before: int) -> None:
    seed_all(1)
    for _ in range(draws_before):
        draw()
    state = rng.capture([CPU])
    expected = [draw() for _ in range(3)]
    checkpoint_file.write(tmp_path / "x.pt", HostCopy(CPU).of({"position": 0, "parts": 0, "ranks": [state]}))
    seed_all(2)
    draw()
    rng.restore(checkpoint_file.read(tmp_path / "x.pt")["ranks"][0], [CPU])
    assert [draw() for _ in range(3)] == expected


def test_looking_changes_nothing() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)
    state = rng.capture([CPU])
    assert draw() == expected
    rng.restore(state, [CPU])
    assert draw() == expected


def test_other_ranks_get_streams_of_their_own() -> None:
    states = []
    for seed in range(3):
        seed_all(seed)
        states.append(rng.capture([CPU]))
    old = []
    for state in states:
        rng.restore(state, [CPU])
        old.append(draw())

    def derived(rank: int, states: list[dict]) -> list[float]:
        seed_all(rank + 50)  # what was there before does not matter
        rng.derive(states, rank)
        return draw()

    new = [derived(rank, states) for rank in range(4)]
    values = [value for stream in [*old, *new] for value in stream if not float(value).is_integer()]
    assert len(values) == len(set(values))
    assert [derived(rank, states) for rank in range(4)] == new
    rng.restore(states[0], [CPU])
    draw()
    later = [rng.capture([CPU]), *states[1:]]
    assert derived(0, later) != new[0]  # a second time, at a later step, they are others again
