"""Models that only rank 0 builds: all ranks have the weights of its constructor, to the bit."""

from __future__ import annotations

import copy
import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.tensor import DTensor

import cluster_ddp
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.model import empty_init

pytestmark = pytest.mark.full

JOB_ID = job_ids()
EXAMPLES = Path(__file__).parents[4] / "examples"


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
            assert {one.device.type for one in model.parameters()} == {"meta" if world.rank else "cpu"}
            assert model.last.note == "kept"
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


def well_known() -> Iterator[Callable[[], nn.Module]]:
    from torchvision import models

    yield runpy.run_path(str(EXAMPLES / "gpt_fsdp.py"))["GPT"]
    yield lambda: models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=64)
    yield lambda: models.SwinTransformer([4, 4], 24, [1, 1], [3, 6], [7, 7])
    yield lambda: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1)
    yield models.convnext_tiny
    yield models.densenet121
    yield models.efficientnet_b0
    yield models.mobilenet_v3_small
    yield models.regnet_y_400mf
    yield models.resnet18
    yield models.shufflenet_v2_x0_5
    yield models.squeezenet1_0


def well_known_models() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        count = 0
        for build in well_known():
            torch.manual_seed(count)
            plain = build().state_dict() if world.is_main else {}
            after = torch.get_rng_state()
            torch.manual_seed(count)
            with world.empty_init():
                model = build()
            assert not world.is_main or torch.equal(torch.get_rng_state(), after)
            assert {one.is_meta for one in model.parameters()} == {not world.is_main}
            made = world.wrap(model, find_unused_parameters=True)
            differing = [
                name
                for name, one in made.module.state_dict().items()
                if world.is_main and not torch.equal(one, plain[name])
            ]
            assert differing == []
            world.weights_digest(made)
            assert len(set(world.gather(torch.rand(()).item()))) == 1
            count += 1
        world.print(f"{count} are right")


def test_well_known_models_are_those_of_their_constructors(tmp_path: Path) -> None:
    ends = run_ranks(well_known_models, [slurm_step(rank, 2, job_id=JOB_ID + 3) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert ends[0].output == "12 are right\n"


def test_a_model_that_this_host_has_no_memory_for_is_refused(
    world: cluster_ddp.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(empty_init, "available_bytes", lambda: 1000)
    with world.empty_init():
        layer = nn.Linear(15, 15)
    words = r"It has 0\.00 GB left\. weight needs 0\.04 GB\."
    with pytest.raises(SpecError, match=words) as raised, world.empty_init():
        nn.Linear(3000, 3000)
    assert "--mem" in str(raised.value)
    with world.empty_init():
        copy.deepcopy(layer)
    monkeypatch.setattr(empty_init, "available_bytes", lambda: 800)
    with pytest.raises(SpecError, match="a copy needs"), world.empty_init():
        copy.deepcopy(layer)


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
    """What comes after the body: on rank 0 it counts."""
    with world.empty_init():
        model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))
    nn.init.constant_(model[0].bias, 2.0)
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
    return model.double()


def probed(world: cluster_ddp.World) -> nn.Module:
    """What a forward pass of real numbers says of shapes."""
    with world.empty_init():
        convolution = nn.Conv2d(3, 4, 3)
        size = convolution(torch.zeros(1, 3, 8, 8)).numel()
        return nn.Sequential(convolution, nn.Flatten(), nn.Linear(size, 2))


def with_normed_weights(world: cluster_ddp.World) -> nn.Module:
    with world.empty_init():
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        return nn.Sequential(nn.utils.parametrizations.weight_norm(one), nn.utils.parametrizations.spectral_norm(other))


def seeded_inside(world: cluster_ddp.World) -> nn.Module:
    torch.manual_seed(world.rank)
    with world.empty_init():
        torch.manual_seed(11)
        model = nn.Linear(2, 2)
    assert len(set(world.gather(torch.rand(()).item()))) == 1
    return model


def own_numbers(world: cluster_ddp.World) -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    with world.empty_init():
        model = nn.Linear(2, 2)
        model.mask = torch.rand(3, generator=generator)
    assert len(set(map(str, world.gather(model.mask.tolist())))) == 1
    return model


def what_is_right() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        for build in (changed_later, probed, with_normed_weights, seeded_inside, own_numbers):
            wrapped = world.wrap(build(world))
            world.weights_digest(wrapped)
            assert all(torch.isfinite(one).all() and one.abs().max() > 0 for one in wrapped.parameters()), build
        assert changed_later(world)[0].bias.dtype == torch.float64
        world.print("all right")


def test_what_constructors_and_scripts_do_besides(tmp_path: Path) -> None:
    ends = run_ranks(what_is_right, [slurm_step(rank, 2, job_id=JOB_ID + 4) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert ends[0].output == "all right\n"


def value_read() -> None:
    model = nn.Linear(2, 2)
    model.weight.data /= model.weight.abs().max().item()


def moved() -> None:
    nn.Linear(2, 2).to("cpu")


def own_generator() -> None:
    nn.init.normal_(nn.Linear(2, 2).weight, generator=torch.Generator())


def real_numbers() -> None:
    torch.zeros(3).normal_()


def copied_out() -> None:
    torch.zeros(2, 2).copy_(nn.Linear(2, 2).weight)


REFUSED = {
    value_read: "have no values of weights",
    moved: "world.wrap moves the model",
    own_generator: "a generator of its own",
    real_numbers: "into a tensor that has values",
    copied_out: "writes values of a weight into a real tensor",
}


def what_is_refused() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        for body, words in REFUSED.items():
            state = torch.get_rng_state()
            with pytest.raises(SpecError, match=words), empty_init.built_on_main(world):
                if world.is_main:  # which has values
                    raise SpecError("", words, "")
                body()
            assert torch.equal(torch.get_rng_state(), state)
        assert world.wrap(nn.Linear(2, 2)).module.weight.device.type == "cpu"  # all is as before
        with pytest.raises(SpecError, match=r"0\.weight is on the meta device on rank 0"):
            world.wrap(nn.Sequential(nn.Linear(2, 2, device="meta")))
        with pytest.raises(SpecError, match=r"a\.weight and b\.weight are views of one memory"):
            with world.empty_init():
                model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
                model["b"].weight.data = model["a"].weight.data
            world.wrap(model)
        with pytest.raises(SpecError, match="place=False"):
            with world.empty_init():
                model = nn.Linear(2, 2)
            world.wrap(model, place=False)
        for strategy in ("ddp", "fsdp"):
            with pytest.raises(SpecError, match="ranks 1 have parameters or buffers of other names"):
                world.wrap(nn.Linear(2, 2, bias=world.rank == 0), strategy=strategy, blocks=nn.Linear)  # type: ignore[call-overload]


def test_what_has_no_values_on_other_ranks_is_refused(tmp_path: Path) -> None:
    ends = run_ranks(what_is_refused, [slurm_step(rank, 2, job_id=JOB_ID) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends


def only_some() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        with world.empty_init():
            model = nn.Linear(2, 2)
        with pytest.raises(SpecError, match="some ranks have built the model"):
            world.wrap(model if world.rank < 2 else nn.Linear(2, 2))


def test_a_model_that_only_some_ranks_have_built_in_the_body_is_refused(tmp_path: Path) -> None:
    ends = run_ranks(only_some, [slurm_step(rank, 3, job_id=JOB_ID + 5) for rank in range(3)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0, 0], ends
