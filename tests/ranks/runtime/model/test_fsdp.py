"""Models that are sharded over the ranks by FSDP2."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import cluster_ddp
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.model.ddp import unwrapped

JOB_ID = job_ids()


class Block(nn.Module):
    """Seven features: on two ranks the shards have different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(7), nn.Linear(7, 7)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.linear(self.norm(x)).relu()  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(world: cluster_ddp.World, model: nn.Module, *, max_norm: float = math.inf, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step in range(steps):
        for half in range(2):
            with world.accumulate(model, half, every=2):
                model(batch(2 * step + half, world.rank)).square().mean().backward()
        norms.append(world.clip_grad_norm(model, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def made(world: cluster_ddp.World) -> Model:
    torch.manual_seed(world.rank)  # all get rank 0's
    return Model()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in unwrapped(model).state_dict().items()
    }


def a_nan_in_one_shard_is_found(world: cluster_ddp.World, model: nn.Module) -> None:
    check = cluster_ddp.FiniteCheck(world, model, on_nan="continue", last_good=lambda: None)
    loss = model(batch(0, world.rank)).square().mean()
    loss.backward()
    assert check.may_update(loss, step=0, epoch=1)
    gradient = next(model.parameters()).grad
    assert isinstance(gradient, DTensor)
    if world.rank == 1:
        gradient.to_local()[0] = math.nan
    assert not check.may_update(loss, step=1, epoch=1)


def ema_of(world: cluster_ddp.World) -> None:
    """An average of the weights, as a second wrapped model."""
    model, average = (world.wrap(made(world), strategy="fsdp", blocks=Block) for _ in range(2))
    plain, expected = world.wrap(made(world)), made(world)
    expected.load_state_dict(plain.module.state_dict())
    for one, of_average, steps in ((model, average, 2), (plain, expected, 2)):
        for _ in range(steps):
            trained(world, one, steps=1)
            with torch.no_grad():
                of_average(batch(0, 0))  # an evaluation leaves no whole tensors, which would take the change
                torch._foreach_lerp_(list(of_average.parameters()), list(one.parameters()), 0.25)
    for name, tensor in whole(average).items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    torch.testing.assert_close(average(batch(0, 0)), expected(batch(0, 0)))


def compiled(world: cluster_ddp.World) -> None:
    for way in ("around", "blocks", "in place"):
        model = made(world)
        if way == "blocks":
            for layer in model.layers:
                layer.compile(backend="eager")
        model = world.wrap(model, strategy="fsdp", blocks=Block)
        if way == "in place":
            model.compile(backend="eager")
        trained_one = torch.compile(model, backend="eager") if way == "around" else model
        trained(world, trained_one, steps=2)
        sharded = world.wrap(made(world), strategy="fsdp", blocks=Block)
        trained(world, sharded, steps=2)
        assert list(unwrapped(trained_one).state_dict()) == list(Model().state_dict())
        assert world.weights_digest(trained_one) == world.weights_digest(sharded), way


def on_two_ranks() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        plain = world.wrap(made(world))
        sharded = world.wrap(made(world), strategy="fsdp", blocks=Block)
        assert isinstance(sharded, Model) and sharded.layers[0].linear.weight.to_local().shape == (4 - world.rank, 7)
        assert world.weights_digest(plain) == world.weights_digest(sharded)
        norms = trained(world, plain, max_norm=0.5)
        assert trained(world, sharded, max_norm=0.5) == pytest.approx(norms, rel=1e-4)
        assert all(one == world.broadcast(one) for one in norms) and max(norms) > 0.5, norms
        for name, one in whole(sharded).items():
            torch.testing.assert_close(one, whole(plain)[name], msg=name)
        found = world.wrap(made(world), strategy="fsdp", blocks=Block)
        a_nan_in_one_shard_is_found(world, found)
        with pytest.raises(SpecError, match="ranks 1 have parameters"):
            world.wrap(nn.Linear(7, 1 + world.rank), strategy="fsdp", blocks=nn.Linear)
        again = world.wrap(made(world), strategy="fsdp", blocks=(Block, nn.Embedding), activation_checkpointing=True)
        assert list(again.state_dict()) == list(Model().state_dict())
        trained(world, again, max_norm=0.5)
        assert world.weights_digest(again) == world.weights_digest(sharded)  # two runs, the same bits
        sharded.layers[1].scale.fill_(world.rank)
        world.share_buffers(sharded)
        assert sharded.layers[1].scale.item() == 0.0
        ema_of(world)
        compiled(world)
        world.print("all right")


@pytest.mark.quick
def test_a_sharded_model_trains_as_under_ddp(tmp_path: Path) -> None:
    ends = run_ranks(on_two_ranks, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert ends[0].output.endswith("all right\n")
    assert "gradients are not. The update of this step is skipped" in ends[0].output


def on_two_nodes() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        with world.empty_init():
            model = made(world)
        sharded = world.wrap(model, strategy="hsdp", blocks=Block, activation_checkpointing=True)
        weight = sharded.layers[0].linear.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.mesh.tolist() == [[0, 2], [1, 3]]
        assert weight.device_mesh.mesh_dim_names == ("replicate", "shard")
        timeout_s = dict.fromkeys(
            weight.device_mesh.get_group(one)._get_backend(world.device).options._timeout for one in (0, 1)
        )
        assert [one.total_seconds() for one in timeout_s] == [world.collective_timeout_s]
        plain = world.wrap(made(world))
        assert world.weights_digest(sharded) == world.weights_digest(plain)
        assert trained(world, sharded, max_norm=0.5) == pytest.approx(trained(world, plain, max_norm=0.5), rel=1e-4)
        for name, one in whole(sharded).items():
            torch.testing.assert_close(one, whole(plain)[name], msg=name)
        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        mixed = world.wrap(made(world), strategy="hsdp", blocks=Block, mesh=own, mixed=torch.bfloat16)
        assert mixed(batch(0, 0)).dtype == torch.bfloat16 and next(mixed.parameters()).dtype == torch.float32
        trained(world, mixed)
        world.weights_digest(mixed)
        mixed(batch(world.rank, 0)).float().square().mean().backward()
        gradient: Any = mixed.layers[0].linear.weight.grad
        assert not torch.equal(gradient.to_local(), gradient.to_local().bfloat16()), "they are added up in float32"
        with pytest.raises(SpecError, match="it has 2 dimensions"):
            world.wrap(made(world), strategy="fsdp", blocks=Block, mesh=own)
        os.environ["SLURMD_NODENAME"] = f"node{int(world.rank == 3)}"
        with pytest.raises(SpecError, match="different numbers of ranks: 3 on node0, 1 on node1"):
            world.wrap(made(world), strategy="hsdp", blocks=Block)


@pytest.mark.full
def test_hsdp_shards_within_each_node(tmp_path: Path) -> None:
    """Whatever the order in which the launcher has spread the ranks."""
    places = [slurm_step(rank, 4, job_id=JOB_ID + 1, SLURMD_NODENAME=f"node{rank % 2}") for rank in range(4)]
    ends = run_ranks(on_two_nodes, places, tmp_path)
    assert [end.exit_code for end in ends] == [0] * 4, ends


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_on_one_rank_a_sharded_model_is_the_plain_one_to_the_bit(
    activation_checkpointing: bool, world: cluster_ddp.World
) -> None:
    plain, more = made(world), {"blocks": Block, "activation_checkpointing": activation_checkpointing}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        for half in range(2):
            plain(batch(2 * step + half, 0)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for strategy in ("fsdp", "ddp"):
        model = world.wrap(made(world), strategy=strategy, **more)  # type: ignore[call-overload]
        trained(world, model, max_norm=0.5)
        assert all(torch.equal(one, plain.state_dict()[name]) for name, one in whole(model).items()), strategy


@pytest.mark.parametrize(("options", "words"), [
    ({"strategy": "fsdpp"}, "no such strategy. Did you mean fsdp"),
    ({"strategy": "fsdp"}, r"blocks is missing: .*\n.*Hint: blocks=Block"),
    ({"strategy": "fsdp", "blocks": nn.Conv2d}, r"the model has no Conv2d.\n.*Hint: blocks=Block"),
    ({"strategy": "fsdp", "blocks": "Block"}, "blocks='Block' is not a class"),
    ({"strategy": "fsdp", "blocks": nn.ModuleList}, r"is not a class of modules with a forward\(\)"),
    ({"strategy": "fsdp", "blocks": Block, "static_graph": True}, 'static_graph=….*\n.*it is for strategy="ddp"'),
    ({"strategy": "hsdp", "blocks": Block, "place": False}, 'place=….*\n.*it is for strategy="ddp", not "hsdp"'),
    ({"strategy": "fsdp", "blocks": Block, "reshard_after_forwards": True}, "Did you mean reshard_after_forward"),
    ({"strategy": "fsdp", "blocks": Block, "dp_mesh_dims": None}, "tensor parallelism is not built"),
    ({"strategy": "fsdp", "blocks": Block, "mixed": torch.int8}, "torch.int8 has no fractions"),
    ({"mixed": torch.bfloat16}, r"it is for strategy=\"fsdp\".*\n.*world.autocast"),
    ({"reshard_after_forward": False}, 'it is for strategy="fsdp" and "hsdp", not "ddp"'),
    ({"activation_checkpointing": True}, "blocks is missing"),
])  # fmt: skip
def test_options_of_another_strategy_are_refused(options: dict[str, Any], words: str, world: cluster_ddp.World) -> None:
    with pytest.raises(SpecError, match=words):
        world.wrap(made(world), **options)


def tied(model: Model) -> None:
    model.layers[2].linear.weight = model.layers[0].linear.weight


REFUSED: list[tuple[Any, str]] = [
    (tied, "layers.0.linear.weight and layers.2.linear.weight are tied, and in different blocks"),
    (lambda model: setattr(model.layers[1], "factor", nn.Parameter(torch.tensor(1.0))), "layers.1.factor is a scalar"),
    (lambda model: setattr(model.head.weight, "data", torch.ones(7, 2)[:, :1].T), "head.weight is not contiguous"),
    (lambda model: model.add_module("table", nn.Embedding(3, 7, sparse=True)), "table has sparse gradients"),
]


def test_models_that_torch_would_refuse_in_the_first_step_are_refused(world: cluster_ddp.World) -> None:
    model = made(world)
    model.layers[1].norm.double()
    with pytest.raises(SpecError, match=r"layers.1.norm.bias \(torch.float64\) and layers.1.linear"):
        world.wrap(model, strategy="fsdp", blocks=Block)
    model.layers[1].norm.requires_grad_(False)
    world.wrap(model, strategy="fsdp", blocks=Block)
    for change, words in REFUSED:
        model = made(world)
        change(model)
        with pytest.raises(SpecError, match=words):
            world.wrap(model, strategy="fsdp", blocks=Block)
    sharded = world.wrap(made(world), strategy="fsdp", blocks=Block)
    with pytest.raises(SpecError, match="it is wrapped already: FSDPModel"):
        world.wrap(sharded)
