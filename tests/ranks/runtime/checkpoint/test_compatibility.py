from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cluster_ddp.runtime.checkpoint import compatibility


def state(model: torch.nn.Module | None = None) -> dict[str, Any]:
    model = model or torch.nn.Linear(3, 2)
    return {
        "saved_by": {"job": "12_3", "array_task": 3},
        "identity": {"dataset": "digits", "classes": 10},
        "shards": [{"size": 100, "seed": 1, "global_batch": 16}],
        "parameters": {},
        "parts": {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters()).state_dict()},
        "ranks": [{"meters": {"loss": {}}}],
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    other = copy.deepcopy(state())
    *folders, last = path.split("/")
    place: Any = other
    for key in folders:
        place = place[int(key) if isinstance(place, list) else key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return other


def test_a_state_fits_itself() -> None:
    assert compatibility.complaint(state(), state()) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("saved_by/array_task", 3),
        ("saved_by/job", "99"),
        ("shards/0/global_batch", 32),
        ("parts/model/weight", torch.ones(2, 3)),
    ],
)
def test_what_may_differ(path: str, value: Any) -> None:
    assert compatibility.complaint(changed(path, value), state()) is None


def test_a_checkpoint_from_outside_an_array_fits_a_task_of_one() -> None:
    none = changed("saved_by/job", "12")
    none["saved_by"]["array_task"] = None
    assert compatibility.complaint(none, state()) is None
    assert compatibility.complaint(state(), none) is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("saved_by/array_task", 4, "it is array task 4's (job 12_3), and this is array task 3"),
        ("saved_by/array_task", 0, "it is array task 0's (job 12_3), and this is array task 3"),
        ("identity/dataset", "mnist", "its dataset is 'mnist', and here it is 'digits'"),
        ("identity/classes", None, "its classes is None, and here it is 10"),
        ("identity/depth", 5, "its depth is 5, and here it is None"),
        ("shards/0/size", 99, "its number of samples in the dataset is 99, and here it is 100"),
        ("shards", [], "its number of shards is 0, and here it is 1"),
        ("shards/0/seed", 2, "its seed of the shuffle is 2, and here it is 1"),
        ("parts/optimizer", None, "it holds model, and here there are model, optimizer"),
        ("parts/ema", {}, "it holds model, optimizer, ema, and here there are model, optimizer"),
        ("parts/model/weight", torch.ones(4, 3), "it has another model: weight is (4, 3) there and (2, 3) here"),
        ("parts/model/bias", None, "it has another model: bias is missing there and (2,) here"),
        ("parts/model/more", torch.ones(()), "it has another model: more is () there and missing here"),
        ("ranks/0/meters/accuracy", {}, "its meters are loss, accuracy, and here they are loss"),
        ("ranks/0/meters/loss", None, "its meters are none, and here they are loss"),
    ],
)
def test_what_differs_is_said(path: str, value: Any, words: str) -> None:
    assert compatibility.complaint(changed(path, value), state()) == words


def test_all_of_an_identity_that_differs_is_said() -> None:
    other = changed("identity/dataset", "mnist")
    other["identity"]["classes"] = 2
    assert compatibility.complaint(other, state()) == (
        "its dataset is 'mnist', and here it is 'digits'; its classes is 2, and here it is 10"
    )


def test_an_optimizer_of_another_kind_is_another_part() -> None:
    """Its load_state_dict would take SGD's groups, and Adam's step then miss its betas."""
    ours, model = state(), torch.nn.Linear(3, 2)
    ours["parts"]["optimizer"] = torch.optim.Adam(model.parameters()).state_dict()
    assert "optimizer" in (compatibility.complaint(state(), ours) or "")


def test_an_optimizer_of_other_groups_is_another_part() -> None:
    ours, model = state(), torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    ours["parts"]["optimizer"] = torch.optim.SGD(groups).state_dict()
    assert "optimizer" in (compatibility.complaint(state(), ours) or "")
