from __future__ import annotations

import pytest
import torch

from cluster_ddp.mnist.model import RECIPES, one_cycle, step_lr


def test_the_references_rate_is_that_of_step_lr() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(14):
        (theirs,) = scheduler.get_last_lr()
        assert step_lr(epoch, 14, 0.7) == pytest.approx(theirs, rel=1e-12)
        assert step_lr(epoch + 937 / 938, 14, 0.7) == step_lr(epoch, 14, 0.7)
        optimizer.step()
        scheduler.step()


def test_one_cycle_goes_up_and_down_to_nothing() -> None:
    rates = [one_cycle(3 * step / 1000, 3, 0.7) for step in range(1001)]
    top = rates.index(max(rates))
    assert top == 200 and rates[top] == pytest.approx(1)
    assert rates[0] == pytest.approx(0.1) and rates[-1] == pytest.approx(0)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_the_help_tells_the_recipes_defaults() -> None:
    """TrainConfig imports no torch, so it can't look them up."""
    from pathlib import Path

    from cluster_ddp.mnist import train_config

    text = " ".join(Path(train_config.__file__).read_text().split())
    reference, fast = RECIPES["reference"], RECIPES["fast"]
    for name in ("epochs", "batch_size", "lr", "amp"):
        assert f"recipe's, {getattr(reference, name):{'g' if name == 'lr' else ''}} or {getattr(fast, name)}." in text
