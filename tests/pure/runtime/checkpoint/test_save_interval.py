from __future__ import annotations

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.checkpoint.save_interval import Interval


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1epoch", Interval(1, "epoch")),
        ("2epochs", Interval(2, "epoch")),
        ("2 epochs", Interval(2, "epoch")),
        ("500steps", Interval(500, "step")),
        ("1step", Interval(1, "step")),
        ("10min", Interval(10, "min")),
        ("10mins", Interval(10, "min")),
        ("1minute", Interval(1, "min")),
        ("10 minutes", Interval(10, "min")),
        ("never", Interval(0, "never")),
    ],
)
def test_how_often(text: str, expected: Interval) -> None:
    assert Interval.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0steps",
        "-1epoch",
        "1.5epochs",
        "epoch",
        "10",
        "10h",
        "1e3steps",
        "٣steps",
        "1  epoch",
        "01steps",
        "Never",
        "10 min ",
        "10min\n",
        "1epochute",
        "3steputes",
        "1steps2",
    ],
)
def test_nothing_else_is_taken(text: str) -> None:
    with pytest.raises(SpecError, match=r"a whole number of epochs, steps or minutes, or never"):
        Interval.parse(text)


def due(text: str, *, steps_per_epoch: int = 4, epochs: int = 4) -> list[int | str]:
    """The steps, and the ends of epochs, at which a training saves."""
    interval, found = Interval.parse(text), list[int | str]()
    for step in range(1, steps_per_epoch * epochs + 1):
        epoch, ended = step // steps_per_epoch, step % steps_per_epoch == 0
        if interval.is_due(step, epoch - ended, epoch_ended=False):
            found.append(step)
        if ended and interval.is_due(step, epoch, epoch_ended=True):
            found.append(f"epoch {epoch}")
    return found


def test_when_it_is_due() -> None:
    assert due("1epoch") == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert due("2epochs") == ["epoch 2", "epoch 4"]
    assert due("3epochs") == ["epoch 3"]
    assert due("4steps") == [4, 8, 12, 16]
    assert due("5steps") == [5, 10, 15]
    assert due("10min") == due("never") == []


def test_minutes_are_counted_from_the_last_save() -> None:
    ten = Interval.parse("10min")
    assert not ten.is_over(599.9)
    assert ten.is_over(600)
    for text in ("1epoch", "1step", "never"):
        assert not Interval.parse(text).is_over(1e9)
