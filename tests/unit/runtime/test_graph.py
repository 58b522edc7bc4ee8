"""When a function is captured and replayed; the capture itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cluster_ddp.runtime import graph
from cluster_ddp.runtime.graph import Graphed


def test_it_runs_then_is_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[float]]] = []

    def function(values: torch.Tensor) -> None:
        calls.append(("run", values.tolist()))

    def captured(function: Callable[..., None], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        calls.append(("captured", inputs[0].tolist()))
        return lambda: calls.append(("replayed", inputs[0].tolist()))

    monkeypatch.setattr(graph, "captured", captured)
    monkeypatch.setattr(graph, "_WARM_UPS", 2)
    graphed, first = Graphed(function), torch.tensor([3.0, 3.0])
    for values in (torch.tensor([1.0]), torch.tensor([2.0, 2.0]), first, torch.tensor([4.0]), torch.tensor([5.0, 5.0])):
        graphed(values)
    assert calls == [
        ("run", [1.0]),
        ("run", [2.0, 2.0]),
        ("captured", [3.0, 3.0]),
        ("replayed", [3.0, 3.0]),
        ("run", [4.0]),
        ("replayed", [5.0, 5.0]),
    ]
    assert first.tolist() == [3.0, 3.0]  # the caller's tensor is nobody's input to write to


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_on_a_gpu_do_what_the_function_does() -> None:
    device, total = torch.device("cuda"), torch.zeros(3, device="cuda")
    graph.prepare(device)
    graphed = Graphed(lambda values: total.add_(values))
    for number in range(20):
        graphed(torch.full((3,), float(number), device=device))
    assert total.tolist() == [190.0] * 3
