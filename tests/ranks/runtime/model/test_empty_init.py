"""Models that are built without memory for their weights: they are those of the constructor, to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.tensor import DTensor

import cluster_ddp
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.model import materialize

pytestmark = pytest.mark.full

JOB_ID = job_ids()


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.linear, self.rate = nn.LayerNorm(width), nn.Linear(width, width), rate
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rate * self.linear(self.mask @ self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Does what constructors do."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width, padding_idx=0)
        rates = [rate.item() for rate in torch.linspace(0.1, 0.3, 3)]
        first = Block(width, rates[0])
        self.layers = nn.ModuleList([first, *(copy.deepcopy(first) for _ in rates[1:])])
        self.head = nn.Linear(width, 11, bias=False)
        self.apply(self.initialize)
        self.head.weight = self.embedding.weight  # tied
        self.place = nn.Parameter(torch.tensor([[0.25] * width]) * torch.arange(5).unsqueeze(1))
        self.turned = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 6)))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.fixed = nn.Parameter(torch.randn(3) / math.sqrt(3))
        self.register_buffer("positions", torch.arange(10)[::2].expand(1, 5), persistent=False)
        self.last = nn.Parameter(torch.randn(3).to(torch.bfloat16).float())
        self.last.note = "kept"  # type: ignore[attr-defined]

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5, a=-1.0, b=1.0)
            module.weight.data.mul_(0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x) + self.place + self.turned.sum() + self.fixed.sum() + self.last.sum()
        for layer in self.layers:
            y = layer(y)
        return self.head(y)  # type: ignore[no-any-return]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_the_constructor_makes_it() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        for strategy in ("ddp", "fsdp"):
            torch.manual_seed(3)
            plain = Model()
            next_number = torch.rand(())
            torch.manual_seed(3 + 10 * world.rank)
            own = torch.get_rng_state()
            with world.empty_init():
                model = Model()
            assert {one.device.type for one in model.parameters()} == {"meta"}
            wrapped = world.wrap(model, strategy=strategy, blocks=Block)  # type: ignore[call-overload]
            model = wrapped.module if strategy == "ddp" else wrapped
            made, right = dict(model.named_parameters()), dict(plain.named_parameters())
            assert list(made) == list(right)
            assert [name for name in right if not torch.equal(whole(made[name]), right[name])] == []
            for (name, buffer), right_one in zip(model.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(buffer, right_one) and buffer.stride() == right_one.stride(), name
            assert model.head.weight is model.embedding.weight and model.last.note == "kept"
            assert isinstance(model.head.weight, DTensor) == (strategy == "fsdp")
            if world.rank == 0:
                assert torch.rand(()) == next_number
            else:
                assert torch.equal(torch.get_rng_state(), own)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            wrapped(torch.ones(2, 5, dtype=torch.int64)).square().mean().backward()
            optimizer.step()
            world.weights_digest(wrapped)
        world.print("all right")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weights_are_those_that_the_constructor_makes(ranks: int, tmp_path: Path) -> None:
    places = [slurm_step(rank, ranks, job_id=JOB_ID + ranks) for rank in range(ranks)]
    ends = run_ranks(as_the_constructor_makes_it, places, tmp_path)
    assert [end.exit_code for end in ends] == [0] * ranks, ends
    assert ends[0].output == "all right\n"


def test_no_rank_holds_more_than_a_few_whole_tensors(world: cluster_ddp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the constructor initializes all weights again at its end, and changes some once more."""
    alive, layers = [], 8
    run = materialize.Replay.run

    def watched(self: materialize.Replay, operation: object) -> None:
        run(self, operation)  # type: ignore[arg-type]
        alive.append(sum(storage.nbytes() for storage in self.storages.values()))

    monkeypatch.setattr(materialize.Replay, "run", watched)
    with world.empty_init():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        model.apply(lambda one: nn.init.trunc_normal_(one.weight) if isinstance(one, nn.Linear) else None)
        for number, layer in enumerate(model):
            with torch.no_grad():
                layer.weight.div_(math.sqrt(2 * number + 2))
    sharded = world.wrap(model, strategy="fsdp", blocks=nn.Linear)
    largest = 64 * 64 * 4
    assert sum(one.numel() for one in sharded.parameters()) * 4 > layers * largest
    assert largest <= max(alive) < 2 * largest
    assert all(one.abs().max() > 0 for one in sharded.parameters())


def test_a_body_may_build_two_models(world: cluster_ddp.World) -> None:
    torch.manual_seed(5)
    plain = [nn.Linear(3, 3), nn.Linear(3, 3)]
    next_number = torch.rand(())
    torch.manual_seed(5)
    with world.empty_init():
        models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    wrapped = [world.wrap(one).module for one in models]
    assert [torch.equal(one.weight, two.weight) for one, two in zip(wrapped, plain)] == [True, True]
    assert torch.rand(()) == next_number


def changed_later(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        model = nn.Sequential(nn.Linear(2, 2))
    nn.init.ones_(model[0].bias)
    return model


def converted_later(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        model = nn.Sequential(nn.Linear(2, 2))
    return model.double()


def made_elsewhere(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        model = nn.Sequential(nn.Linear(2, 2))
    return model.append(nn.LayerNorm(2, device="meta"))


def value_read(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        model = nn.Linear(2, 2)
        model.weight.data /= model.weight.abs().max().item()
    return model


def moved(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        return nn.Linear(2, 2).to(world.device)


def own_generator(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        return nn.Linear(2, 2).apply(lambda one: nn.init.normal_(one.weight, generator=torch.Generator()))


def nested(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init(), world.empty_init():
        return nn.Linear(2, 2)


def real_numbers(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        model = nn.Linear(2, 2)
        torch.randn(3, device="cpu")
        return model


@pytest.mark.parametrize(("build", "words"), [
    (changed_later, "0.bias was changed after the body"),
    (converted_later, "0.weight is on the meta device and was not made in the body"),
    (made_elsewhere, "1.weight is on the meta device and was not made in the body"),
    (value_read, "a value of a random tensor is read"),
    (moved, "leave that out: world.wrap moves the model"),
    (own_generator, "a generator of its own"),
    (nested, "in the body of another one"),
    (real_numbers, "draws real numbers after those of weights"),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(
    build: Callable[[cluster_ddp.World], nn.Module], words: str, world: cluster_ddp.World
) -> None:
    state = torch.get_rng_state()
    with pytest.raises(SpecError, match=words):
        world.wrap(build(world))
    assert torch.equal(torch.get_rng_state(), state)
    assert world.wrap(nn.Linear(2, 2)).module.weight.device.type == "cpu"  # all is as before


def another_model_on_rank_1() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        with world.empty_init():
            model = nn.Linear(2, 2)
            nn.init.constant_(model.weight, 1.0 + world.rank)
        with pytest.raises(SpecError, match="ranks 1 did something else"):
            world.wrap(model)
        with pytest.raises(SpecError, match="ranks 1 have parameters or buffers of other names"):
            world.wrap(nn.Linear(2, 2, bias=world.rank == 0), strategy="fsdp", blocks=nn.Linear)


def test_ranks_with_different_models_are_refused_by_all(tmp_path: Path) -> None:
    ends = run_ranks(another_model_on_rank_1, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
