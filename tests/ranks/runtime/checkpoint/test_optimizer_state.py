"""The state of an optimizer comes back as it was saved: dtypes, strides, strings, and the groups of its parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, data, digest, equal_after_kill, net
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer

import cluster_ddp
from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint.exactness import optimizer_state
from cluster_ddp.runtime.model.dtensor_pieces import full
from cluster_ddp.runtime.world import World


class MasterWeights(Optimizer):
    """Momentum SGD of bfloat16 parameters, with float32 weights and moments in its state."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["weights"] = parameter.float()
                    state["moments"] = torch.zeros_like(state["weights"])
                state["moments"].mul_(0.9).add_(parameter.grad.float())
                state["weights"].add_(state["moments"], alpha=-group["lr"])
                parameter.copy_(state["weights"])


class ManyTypes(Optimizer):
    """Its state has integers that float32 can't hold, flags, complex numbers, a list and strings."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "name": "many", "is_new": True, "rates": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["rates"] = [*group["rates"], group["lr"]][-3:]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["hash"] = torch.tensor([2**40 + 1])
                    state["flags"] = torch.ones_like(parameter, dtype=torch.bool)
                    state["phase"] = torch.zeros(2, dtype=torch.complex64)
                    state["name"], state["norms"] = "first", []
                state["hash"] = (state["hash"] * 6364136223846793005 + 1442695040888963407) % 2**45
                state["flags"] ^= parameter.grad > 0
                state["phase"] += 1j * float(full(parameter.grad.abs().max()))
                state["name"] += "." if len(state["name"]) < 12 else ""
                state["norms"] = [*state["norms"], full(parameter.grad.abs().max())][-3:]
                scale = 0.5 + (int(state["hash"]) % 1000) / 1000 + len(state["name"]) / 100
                parameter.add_(parameter.grad * (1 + 0.5 * state["flags"].float()) * scale, alpha=-group["lr"])
                parameter.add_(float(state["phase"].imag.sum()) * 1e-3)


Make = Callable[[Any], Optimizer]
TRAININGS: Mapping[str, tuple[torch.dtype, Make]] = {
    "nadam64": (torch.float64, lambda parameters: NAdam(parameters, 0.01)),
    "nadam16": (torch.bfloat16, lambda parameters: NAdam(parameters, 0.01)),
    "asgd64": (torch.float64, lambda parameters: ASGD(parameters, 0.01, t0=5)),
    "asgd16": (torch.bfloat16, lambda parameters: ASGD(parameters, 0.01, t0=5)),
    "master16": (torch.bfloat16, MasterWeights),
    "ints": (torch.float32, ManyTypes),
}


def train(world: World, point: Point, *, name: str, strategy: str) -> dict[str, Any]:
    dtype, make = TRAININGS[name]
    blocks = {"blocks": torch.nn.Linear} if strategy == "fsdp" else {}
    model = world.wrap(net().to(dtype), strategy=strategy, **blocks)
    optimizer = make(model.parameters())
    shard = world.shard(data(), batch_size=8, shuffle_seed=3)
    world.seed_rank(2)
    parts = {"model": model, "optimizer": optimizer}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="2steps", **parts)
    for _ in checkpoint.epochs(3):
        for x, y in shard:
            loss = F.cross_entropy(model(x.to(dtype)).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            point("after", checkpoint.steps)
    return {part: one.state_dict() for part, one in parts.items()}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path, name: str, strategy: str) -> None:
    equal_after_kill(functools.partial(train, name=name, strategy=strategy), tmp_path, kill=("after", 9))


def stepped(model: torch.nn.Module, make: Make, dtype: torch.dtype = torch.float32) -> Optimizer:
    """An optimizer after two steps."""
    optimizer = make(model.parameters())
    for x, y in (data(8)[:], data(8)[:]):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", TRAININGS)
def test_each_value_comes_back_as_it_was(world: World, tmp_path: Path, name: str) -> None:
    dtype, make = TRAININGS[name]
    model = net().to(dtype)
    optimizer = stepped(model, make, dtype)
    saved = digest(optimizer.state_dict())
    save(world, tmp_path, optimizer=optimizer)
    again = make(net().to(dtype).parameters())
    cluster_ddp.Checkpointer(world, run_dir=tmp_path, optimizer=again)
    assert digest(again.state_dict()) == saved


def save(world: World, run_dir: Path, **parts: Any) -> None:
    checkpoint = cluster_ddp.Checkpointer(world, run_dir=run_dir, every="1steps", **parts)
    for _ in checkpoint.until(1):
        checkpoint.step()


def test_tensors_of_the_host_stay_there_and_others_go_to_their_parameters() -> None:
    """The meta device stands in for a GPU."""
    parameter = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16, device="meta"))
    optimizer = SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"step": torch.tensor(2.0), "moments": torch.empty(3, device="meta")}
    optimizer.state[parameter]["lists"] = {"host": [torch.ones(3)], "device": torch.empty(3, device="meta")}
    devices = optimizer_state.elsewhere(optimizer)
    assert devices == {"[0]['lists']['host'][0]": "cpu"}
    state = optimizer.state_dict()
    state["state"][0]["moments"] = torch.ones(3)  # as from the file
    optimizer_state.load(optimizer, state, devices)
    loaded = optimizer.state[parameter]
    assert [loaded["step"].device.type, loaded["moments"].device.type] == ["cpu", "meta"]
    assert [loaded["lists"]["host"][0].device.type, loaded["lists"]["device"].device.type] == ["cpu", "meta"]
    assert loaded["moments"].dtype == torch.float32


def test_strides_come_back(world: World, tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = AdamW(model.parameters())
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    save(world, tmp_path, optimizer=optimizer)
    again = AdamW(torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).parameters())
    cluster_ddp.Checkpointer(world, run_dir=tmp_path, optimizer=again)
    (weight, _) = again.param_groups[0]["params"]
    assert again.state[weight]["exp_avg"].stride() == weight.stride() != (27, 9, 3, 1)
    assert digest(again.state_dict()) == digest(optimizer.state_dict())


def test_hooks_see_the_state_as_it_was_saved() -> None:
    model = net().bfloat16()
    optimizer = stepped(model, MasterWeights, torch.bfloat16)
    state, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append({entry["moments"].dtype for entry in one.state.values()})
    )
    optimizer.register_load_state_dict_pre_hook(lambda _, given: {**given, "more": 1})
    optimizer_state.load(optimizer, state, {})
    assert seen == [{torch.float32}]


class OwnLoad:
    """A part that hands its state to an optimizer of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def test_a_part_that_casts_its_state_itself_is_said(
    world: World, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    model = net().bfloat16()
    save(world, tmp_path, inner=OwnLoad(stepped(model, MasterWeights, torch.bfloat16)))
    cluster_ddp.Checkpointer(world, run_dir=tmp_path, inner=OwnLoad(MasterWeights(model.parameters())))
    (words,) = [record.getMessage() for record in said.records if record.levelno == logging.WARNING]
    assert "load_state_dict of inner casts its state" in words and "torch.float32 in the checkpoint" in words


def groups_of(model: torch.nn.Sequential, *, backbone_first: bool) -> list[dict[str, Any]]:
    head, backbone = {"params": [*model[3].parameters()]}, {"params": [*model[0].parameters()], "lr": 0.001}
    return [backbone, head] if backbone_first else [head, backbone]


def test_groups_of_the_same_parameters_are_taken_from_the_checkpoint(world: World, tmp_path: Path) -> None:
    """Head first and then the backbone; the next start has them in another order, or in one group."""
    model = net()
    optimizer = stepped(model, lambda _: AdamW(groups_of(model, backbone_first=False)))
    save(world, tmp_path, model=model, optimizer=optimizer)
    for groups in (lambda one: groups_of(one, backbone_first=True), lambda one: one.parameters()):
        other = net()
        again = AdamW(groups(other))
        cluster_ddp.Checkpointer(world, run_dir=tmp_path, model=other, optimizer=again)
        assert digest(again.state_dict()) == digest(optimizer.state_dict())
        assert again.param_groups[1]["params"][0] is other[0].weight
        moments = again.state[other[0].weight]["exp_avg"]
        assert torch.equal(moments, optimizer.state[model[0].weight]["exp_avg"])


def test_a_group_that_was_added_later_is_refused_with_the_cure(world: World, tmp_path: Path) -> None:
    model = net()
    optimizer = AdamW(model[3].parameters())
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.001})
    save(world, tmp_path, model=model, optimizer=optimizer)
    again = AdamW(model[3].parameters())
    words = r"optimizer also has model\.0\.weight, model\.0\.bias: give the optimizer all its parameters before .* lr=0"
    with pytest.raises(CheckpointError, match=words):
        cluster_ddp.Checkpointer(world, run_dir=tmp_path, model=model, optimizer=again)


def test_an_optimizer_of_shares_is_refused_with_the_cure(world: World, tmp_path: Path) -> None:
    class ZeroRedundancyOptimizer(AdamW):
        """Stands in for torch's, which needs several ranks: only its name is looked at."""

    optimizer = ZeroRedundancyOptimizer(net().parameters())
    with pytest.raises(CheckpointError, match=r'strategy="fsdp"'):
        cluster_ddp.Checkpointer(world, run_dir=tmp_path, optimizer=optimizer)
