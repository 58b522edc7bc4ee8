"""What a script sets in its model as it trains: a resume has it, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, data, equal_after_kill, net
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

import cluster_ddp
from cluster_ddp.runtime.checkpoint.exactness.module_settings import ModuleSettings
from cluster_ddp.runtime.model.ddp import unwrapped
from cluster_ddp.runtime.world import World


def settings_of_epochs(world: World, point: Point, *, strategy: str) -> dict[str, Any]:
    """In the second epoch, the first layer is frozen and more is dropped; in the third, that ends."""
    options: dict[str, Any] = {"find_unused_parameters": True}
    model: Any = world.wrap(net(), **(options if strategy == "ddp" else {"strategy": "fsdp", "blocks": nn.Linear}))
    first, _, dropout, _ = unwrapped(model)
    optimizer = SGD(model.parameters(), 0.1)
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    world.seed_rank(2)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="1steps", model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(3):
        for x, y in shard:
            if (epoch, shard.step) == (1, 1):
                first.requires_grad_(False)
                dropout.p = 0.5
            if (epoch, shard.step) == (2, 2):
                first.requires_grad_(True)
                dropout.eval()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            checkpoint._saver.wait()
            point("stepped", checkpoint.steps)
    assert (dropout.p, dropout.training, first.weight.requires_grad) == (0.5, False, True)
    return {"model": model.state_dict()}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_layer_frozen_and_a_dropout_changed_in_mid_training(tmp_path: Path, strategy: str) -> None:
    training = functools.partial(settings_of_epochs, strategy=strategy)
    equal_after_kill(training, tmp_path, kill=[("stepped", 9), ("stepped", 13), ("stepped", 16)])


@pytest.mark.parametrize(
    ("sets", "lost"), [({}, ["model.0.calls = 3", "model.0.cached = True"]), ({"calls": 4, "cached": True}, [])]
)
def test_flags_and_counts_that_are_not_set_again_are_only_named(sets: dict[str, Any], lost: list[str]) -> None:
    """They may belong to a cache that a new process does not have."""

    def made() -> tuple[Any, ModuleSettings]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        vars(model[0]).update(calls=0, cached=False, scale=1.0, hidden=None)
        return model, ModuleSettings({"model": model, "optimizer": SGD(model.parameters(), 0.1)})

    model, settings = made()
    vars(model[0]).update(calls=3, cached=True, scale=0.5)
    model[1].p = 0.3
    model[0].bias.requires_grad_(False)
    model[1].eval()
    changed = {"model.0.bias.requires_grad": False, "model.0.scale": 0.5, "model.1.p": 0.3, "model.1.training": False}
    assert settings.changed() == {**changed, "model.0.calls": 3, "model.0.cached": True}
    assert settings.unsaved() == settings.lost() == []
    vars(model[0])["hidden"] = torch.ones(2)  # None at first
    assert settings.unsaved() == ["model.0.hidden"]
    model, again = made()
    again.load(settings.changed())
    assert again.changed() == settings.changed() and model[0].training and not model[1].training
    vars(model[0]).update(sets)
    assert again.lost() == lost
    assert again.lost() == [] and again.changed() == {
        **changed,
        **{f"model.0.{name}": value for name, value in sets.items()},
    }


@pytest.mark.parametrize(
    ("begins_at", "inside", "epochs", "resets", "lost"),
    [
        (0, True, 1, False, ["model.calls = 5"]),
        (5, True, 1, False, []),
        (0, False, 1, False, ["model.calls = 5"]),
        (0, False, 2, False, ["model.calls = 10"]),
        (10, False, 2, False, []),
        (0, False, 2, True, []),
        (0, True, 2, True, ["model.calls = 5"]),
    ],
)
def test_a_count_that_begins_again_is_named(
    begins_at: int, inside: bool, epochs: int, resets: bool, lost: list[str]
) -> None:
    """At the first save after a resume it is not as it was made: each forward counts. Some count in each epoch."""

    def made() -> tuple[Any, ModuleSettings]:
        model = nn.Linear(2, 2)
        vars(model).update(calls=0, batch_size=0)
        return model, ModuleSettings({"model": model})

    def train(model: Any, settings: ModuleSettings, steps: int) -> None:
        for step in range(steps):
            model.calls += 1
            model.batch_size = 4 if step < 4 else 2
            settings.note_step(begins_epoch=step == 0)

    model, settings = made()
    for _ in range(epochs):
        model.calls *= not resets
        train(model, settings, 5)
    saved, noted = settings.changed(), settings.first_steps.noted
    model, again = made()
    again.load(saved)
    again.first_steps.resume(noted, inside=inside)
    model.calls = begins_at
    train(model, again, 3)
    assert (again.lost(), again.lost()) == (lost, [])


def test_layers_hooks_and_names_that_are_new_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    settings = ModuleSettings({"model": model})
    assert settings.replaced() == []
    prune.random_unstructured(model[0], "weight", amount=0.5)
    model[1] = nn.Dropout(0.1)
    model.append(nn.Tanh())
    assert {*settings.replaced()} == {"model.0", "model.0.weight", "model.0.weight_orig", "model.1", "model.2"}


def test_what_was_changed_again_is_as_it_was_saved() -> None:
    """As by the code between the loops over epochs and batches, which a resume runs again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    settings = ModuleSettings({"model": model})
    settings.load({"model.1.p": 0.3})
    model[1].p *= 2
    model[0].weight.requires_grad_(False)
    settings.reload()
    assert (model[1].p, model[0].weight.requires_grad, settings.changed()) == (0.3, True, {"model.1.p": 0.3})


def test_another_runs_checkpoint_leaves_the_scripts_own(world: World, tmp_path: Path) -> None:
    """A fine-tuning freezes what the pretraining has trained."""
    rows = torch.utils.data.TensorDataset(torch.randn(8, 2))

    def training(name: str, *, freezes: bool, resume: str | Path = "auto") -> nn.Linear:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(not freezes)
        shard = world.shard(rows, batch_size=4)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=tmp_path / name, model=model, resume=resume)
        for epoch in checkpoint.epochs(2):
            if epoch == 1:
                model.weight.requires_grad_(False)
            for _ in shard:
                checkpoint.step()
        return model

    training("pretraining", freezes=False)
    newest = sorted((tmp_path / "pretraining/checkpoints").glob("step-*"))[-1]
    model = training("fine-tuning", freezes=True, resume=newest)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
