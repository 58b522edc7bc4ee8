"""A loss or a gradient that is no number never reaches the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.errors import NonFiniteError
from cluster_ddp.runtime import non_finite
from cluster_ddp.runtime.non_finite import FiniteCheck, OnNan
from cluster_ddp.slurm.variables import node_name

JOB_ID = job_ids()


def check(
    model: torch.nn.Module,
    *,
    on_nan: OnNan = "stop",
    last_good: Path | None = None,
    collectives: list[Any] | None = None,
    device: str = "cpu",
    scaler: torch.amp.GradScaler | None = None,
) -> FiniteCheck:
    def gather(mine: Any) -> list[Any]:
        if collectives is not None:
            collectives.append(mine)
        return [mine]

    world: Any = SimpleNamespace(
        gather=gather,
        broadcast=lambda mine: gather(mine)[0],
        synchronize=lambda: None,
        is_main=True,
        device=torch.device(device),
    )
    return FiniteCheck(world, model, on_nan=on_nan, last_good=lambda: last_good, scaler=scaler)


def backward(model: torch.nn.Module, factor: float = 1.0) -> torch.Tensor:
    loss = (model(torch.ones(2, 3)) * factor).sum()
    loss.backward()
    return loss


def test_what_is_finite_may_update_without_a_collective() -> None:
    model, collectives = torch.nn.Linear(3, 2), list[Any]()
    loss = backward(model, 1e30)
    assert check(model, collectives=collectives).may_update(loss, step=0, epoch=1)
    assert collectives == []


@pytest.mark.filterwarnings("error")  # torch warns of a loss that is not detached
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_stops_and_is_named(factor: float, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    loss = backward(model, factor)
    with pytest.raises(NonFiniteError) as error:
        check(model, last_good=tmp_path / "step-00000007.pt").may_update(loss, step=8, epoch=2)
    assert error.value.asked == "Training, step 8 of epoch 2:"
    assert f"rank 0 on {node_name(os.environ)}: loss {float(loss.detach())}" in error.value.found
    assert f"last good checkpoint: {tmp_path}/step-00000007.pt" in error.value.found
    assert "--on-nan continue" in error.value.hint


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bad_number_among_many_parameters_is_found(bad: float, place: int, dtype: torch.dtype) -> None:
    """With a finite loss: sqrt at 0, a division, an overflow in half precision."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parameter = list(model.parameters())[place]
    assert parameter.grad is not None
    parameter.grad.view(-1)[place] = bad
    with pytest.raises(NonFiniteError, match=r"the loss is finite on all ranks, but gradients are not.*none yet"):
        check(model).may_update(torch.tensor(1.0), step=0, epoch=1)


def test_frozen_and_unused_parameters_do_not_matter() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    loss = backward(model)
    model[1].bias.grad = None
    assert check(model).may_update(loss, step=0, epoch=1)
    for parameter in model.parameters():
        parameter.grad = None
    assert check(model).may_update(loss, step=0, epoch=1)


def rank_1_has_nan() -> None:
    """Two ranks, five steps: on rank 1 the third step's data is no number. First such updates are left out."""
    with cluster_ddp.distributed(cuda=False) as world:
        torch.manual_seed(1)
        model = world.wrap(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for on_nan in ("continue", "stop"):
            looking = FiniteCheck(
                world, model, on_nan=on_nan, last_good=lambda: Path("good.pt") if world.is_main else None
            )
            weights, updated = [model.module.weight.tolist()], []
            try:
                for step in range(5):
                    data = torch.full((2, 3), float("nan") if (world.rank, step) == (1, 2) else 1.0 + world.rank)
                    optimizer.zero_grad()
                    loss = model(data).square().mean()
                    loss.backward()
                    updated.append(looking.may_update(loss, step=step, epoch=1))
                    if updated[-1]:
                        optimizer.step()
                    weights.append(model.module.weight.tolist())
            except NonFiniteError as error:
                updated.append(str(error))
            print(json.dumps([updated, weights]), flush=True)


def test_nan_on_one_of_two_ranks_is_named_on_both(tmp_path: Path) -> None:
    ends = run_ranks(rank_1_has_nan, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    lines = [[json.loads(line) for line in end.output.splitlines() if line.startswith("[[")] for end in ends]
    assert lines[0] == lines[1]  # the same on both ranks, the weights bit for bit
    (continued, weights), (stopped, last_weights) = lines[0]
    assert continued == [True, True, False, True, True]
    assert weights[2] == weights[3] != weights[4] != weights[5]
    assert all(number == number for step in weights for number in step[0])
    assert stopped[:2] == [True, True] and len(stopped) == 3
    named = f"rank 1 on {node_name(os.environ)}: loss nan. This state is not saved; last good checkpoint: good.pt."
    assert named in stopped[2] and "rank 0 on" not in stopped[2]
    assert len(last_weights) == 3
    warning = (
        f"Training, step 2 of epoch 1: rank 1 on {node_name(os.environ)}: loss nan. The update of this step is skipped."
    )
    assert [end.output.count(warning) for end in ends] == [1, 0]


def test_it_says_on_rank_0_only_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(non_finite.log, "warning", lambda text, *values: warned.append(text % values))
    model = torch.nn.Linear(3, 2)
    looking = check(model, on_nan="continue")
    assert not looking.may_update(backward(model, float("nan")), step=3, epoch=1)
    assert warned and "The update of this step is skipped." in warned[0]
    looking._world.is_main = False  # type: ignore[misc]
    assert not looking.may_update(torch.tensor(0.0), step=4, epoch=1)
    assert len(warned) == 1


def test_on_a_gpu_steps_are_judged_when_it_is_waited_for() -> None:
    """The tensors are on the CPU here; that nothing waits for the device is in tests/ranks/mnist/test_loop.py."""
    model = torch.nn.Linear(3, 2)
    looking = check(model, device="cuda")
    for step, factor in enumerate((1.0, float("nan"), float("inf"))):
        model.zero_grad()
        assert looking.may_update(backward(model, factor), step=step, epoch=1)
    with pytest.raises(NonFiniteError, match=r"(?s)step 1 of epoch 1.*loss nan.*This state is not saved") as error:
        looking.look()
    assert "loss inf" not in str(error.value)  # the first bad step is named, not the last
    assert looking.look()  # of none
    assert not check(model, device="cuda", on_nan="continue").may_update(torch.tensor(0.0), step=0, epoch=1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_a_scaler_only_the_loss_counts(device: str) -> None:
    """It skips updates whose gradients overflow. The tensors are on the CPU here."""
    model = torch.nn.Linear(3, 2)
    looking = check(model, device=device, scaler=torch.amp.GradScaler("cpu"))
    loss = backward(model)
    model.weight.grad.fill_(float("inf"))
    assert looking.may_update(loss, step=0, epoch=1) and looking.look()
    with pytest.raises(NonFiniteError, match=r"(?s)step 2 of epoch 1.*loss nan"):
        looking.may_update(loss, step=1, epoch=1)
        looking.may_update(backward(model, float("nan")), step=2, epoch=1)
        looking.look()
    disabled = check(model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(NonFiniteError, match="gradients are not"):
        disabled.may_update(loss, step=0, epoch=1)
