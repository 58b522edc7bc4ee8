"""The fast paths do what the plain one does."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster_ddp
from cluster_ddp import DeviceError
from cluster_ddp.mnist import data
from cluster_ddp.mnist.model import chosen
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.mnist.training import CudaGraphs, Step

pytestmark = pytest.mark.full


def make_step(world: cluster_ddp.World, **options: Any) -> Step:
    config = TrainConfig(dataset="digits", **options)
    return Step(config, chosen(config, world), world)


def losses(
    layout: torch.memory_format = torch.contiguous_format,
    *,
    lr: float = 0.1,
    graphs: CudaGraphs | None = None,
    **options: Any,
) -> torch.Tensor:
    """The mean loss of each of the steps of an epoch on the digits, the last one smaller."""
    with cluster_ddp.distributed(cuda=False) as world:
        train_set, _ = data.load("digits", Path())
        shard = world.shard(train_set, batch_size=32, shuffle_seed=1)
        step = make_step(world, lr=lr, **options)
        if graphs is not None:
            step._use(graphs)
        step.layout = layout
        step.model.train()
        found = []
        for images, labels in shard:
            found.append(step.backward(images, labels, shard).detach() / len(labels))
            step.update(0)
        return torch.stack(found)


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return losses()


@pytest.mark.parametrize(
    ("layout", "options", "at_first", "later"),
    [
        (torch.channels_last, {}, 1e-3, 0.1),
        (torch.contiguous_format, {"amp": "bf16"}, 0.05, 0.3),
        (torch.channels_last, {"amp": "bf16"}, 0.05, 0.3),
    ],
)
def test_loss_curves_match(
    plain: torch.Tensor, layout: torch.memory_format, options: dict[str, Any], at_first: float, later: float
) -> None:
    """Tolerances: of the loss, absolute, in the first ten steps, and in those in which it falls from 2.3 to below 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of DDP, on strides
        found = losses(layout, **options)
    assert plain[-5:].mean() < 1 < plain[0]
    differences = (found - plain).abs()
    assert differences[:10].max() < at_first
    assert differences.max() < later


def test_a_graphed_step_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for what only a GPU can: a replay runs the function again, on the inputs that stay in place."""
    captures: list[tuple[torch.Tensor, ...]] = []

    def captured(function: Callable[..., None], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        captures.append(inputs)
        return functools.partial(function, *inputs)

    monkeypatch.setattr(CudaGraphs, "__init__", lambda self: None)
    monkeypatch.setattr(CudaGraphs, "captured", staticmethod(captured))
    graphs = CudaGraphs()  # type: ignore[call-arg]
    assert torch.equal(losses(lr=0.5, graphs=graphs), losses(lr=0.5))  # 0.5 is the same number in float32
    assert [len(inputs) for inputs in captures] == [2, 0]


@pytest.mark.parametrize(("amp", "tf32"), [("off", False), ("bf16", True)])
def test_off_means_float32_on_gpus_too(monkeypatch: pytest.MonkeyPatch, amp: str, tf32: bool) -> None:
    """By default, convolutions have ten bits of mantissa there."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with cluster_ddp.distributed(cuda=False) as world:
        make_step(world, amp=amp)
    assert torch.backends.cudnn.allow_tf32 == tf32


def test_a_graph_without_a_gpu_is_refused() -> None:
    refused = pytest.raises(DeviceError, match="this rank computes on cpu")
    with cluster_ddp.distributed(cuda=False) as world, refused:
        make_step(world, cuda_graph=True)
