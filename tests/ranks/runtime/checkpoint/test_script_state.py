"""What a script keeps in variables and objects of its own is named, and exact if it is in a part."""

from __future__ import annotations

import array
import functools
import importlib
import itertools
import math
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp import World
from cluster_ddp.errors import CheckpointError, SpecError

CARRIES = "the script carries variables from step to step: {}. No checkpoint has that"
CHANGES = "objects of the script change: {}. No checkpoint has that"
calls = 0


# No `assert` stands in a loop below: pytest replaces such a function by another, whose source nobody has.
class Parts:
    """A training of two epochs of three steps, with a save after each."""

    def __init__(self, world: World, run_dir: Path, **parts: Any) -> None:
        self.world, self.model = world, nn.Linear(2, 2)
        self.shard = world.shard(TensorDataset(torch.ones(12, 2)), batch_size=4, shuffle_seed=1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        parts = {"model": self.model, "optimizer": self.optimizer, **parts}
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=self.shard, run_dir=run_dir, every="1steps", **parts)

    def step(self) -> None:
        self.checkpoint.step()
        self.checkpoint._saver.wait()


class Average:
    """Of the weights; with a state_dict, or without."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow, self.updates = model, [one.detach().clone() for one in model.parameters()], 0

    def update(self) -> None:
        self.updates += 1
        for mean, one in zip(self.shadow, self.model.parameters()):
            mean.lerp_(one.detach(), 0.5)


class Trainer:
    """Keeps its count itself."""

    made = 0

    def __init__(self, parts: Parts) -> None:
        self.parts, self.steps, self.device = parts, 0, torch.device("cpu")
        Trainer.made = 0

    def train(self) -> None:
        for _ in self.parts.checkpoint.epochs(2):
            for _ in self.parts.shard:
                self.one_step()

    def one_step(self) -> None:
        self.steps += 1
        Trainer.made += 1
        self.parts.step()


def call() -> None:
    call_inner()


def call_inner() -> None:
    global calls
    calls += 1


class Smoothed:
    """Keeps its mean in a slot."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 0.0

    def add(self, value: float) -> None:
        self.mean += value


class Engine:
    """Has callbacks."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.callbacks = parts, [Smoothed(), Smoothed()]

    def run(self) -> None:
        for _ in self.parts.checkpoint.epochs(2):
            for _ in self.parts.shard:
                self.callbacks[1].add(1.0)
                self.parts.step()


def smooth(value: float, bank: dict[int, float] = {}) -> float:  # noqa: B006
    bank[0] = bank.get(0, 0.0) + value
    return bank[0]


def ramp_of(steps: int) -> Callable[[], float]:
    made = 0

    def ramp() -> float:
        nonlocal made
        made += 1
        return made / steps

    return ramp


def replaces_its_loss(parts: Parts) -> None:
    criterion, is_noisy = nn.CrossEntropyLoss(), False
    for epoch in parts.checkpoint.epochs(2):
        if epoch == 1:
            criterion, is_noisy = nn.CrossEntropyLoss(label_smoothing=0.2), True
        for (x,) in parts.shard:
            criterion(parts.model(x) + is_noisy, torch.zeros(4).long())
            parts.step()


def has_objects_in_containers(parts: Parts) -> None:
    means = {"ce": Smoothed(), "other": Smoothed()}
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            means["ce"].add(1.0)
            parts.step()


def has_an_engine(parts: Parts) -> None:
    Engine(parts).run()


def noisy(batches: Any) -> Iterator[torch.Tensor]:
    sigma = 1.0
    for (x,) in batches:
        yield x * sigma
        sigma *= 0.97


def reads_through_a_generator(parts: Parts) -> None:
    for _ in parts.checkpoint.epochs(2):
        for _ in enumerate(noisy(parts.shard), start=parts.shard.step + 1):
            parts.step()


def has_partials_and_bound_methods(parts: Parts) -> None:
    draw, sums = random.Random(7).random, array.array("d", [0.0])
    noise = functools.partial(np.random.default_rng(0).normal, 0.0, 0.2)
    grow = functools.partial(smooth, bank={})
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            draw(), noise(), grow(1.0)
            sums[0] += 1
            parts.step()


def has_more_hooks(parts: Parts) -> None:
    counts = {"weight": 0}

    def of_weight(gradient: torch.Tensor) -> None:
        counts["weight"] += 1

    def of_step(*_: object) -> None:
        means[0].add_(1)

    means = [torch.zeros(2)]
    parts.model.weight.register_hook(of_weight)
    parts.optimizer.register_step_post_hook(of_step)
    for _ in parts.checkpoint.epochs(2):
        for (x,) in parts.shard:
            parts.optimizer.zero_grad()
            parts.model(x).sum().backward()
            parts.optimizer.step()
            parts.step()


def has_functions_with_a_memory(parts: Parts) -> None:
    ramp, mean = ramp_of(6), 0.0

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal mean
        mean += output.detach().mean().item()

    parts.model.register_forward_hook(hook)
    for _ in parts.checkpoint.epochs(2):
        for (x,) in parts.shard:
            parts.model(x)
            ramp(), smooth(1.0)
            parts.step()


def fills_lists_in_each_epoch(parts: Parts) -> None:
    for _ in parts.checkpoint.epochs(2):
        features = list[torch.Tensor]()
        for (x,) in parts.shard:
            features.append(x.mean(0))
            parts.step()
        torch.stack(features).mean(0)


def decays_in_a_class(parts: Parts) -> None:
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            Levels.level *= 0.9
            parts.step()


class Levels:
    level = 1.0


def keeps_numbers(parts: Parts) -> None:
    best, waited = math.inf, 0
    for epoch in parts.checkpoint.epochs(2):
        total = 0.0
        for (x,) in parts.shard:
            loss = parts.model(x).sum().item()
            total += loss
            parts.step()
        if total < best:
            best, waited = total, epoch
        elif waited > 5:
            break


def draws_itself(parts: Parts) -> None:
    one, other, third = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
    fourth = np.random.RandomState(1)
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            torch.rand(1, generator=one)
            other.random(), third.random(), fourth.rand()
            parts.step()


def reads_another_iterator(parts: Parts) -> None:
    numbers = itertools.count()
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            next(numbers)
            parts.step()


def fills_containers(parts: Parts) -> None:
    losses, seen, means, options = list[float](), dict[int, int](), torch.zeros(2), Namespace(lr=0.1, name="a")
    for epoch in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            losses.append(1.0)
            seen[epoch] = 1
            means += 1
            options.lr *= 0.9
            parts.step()


def averages(parts: Parts) -> None:
    average = Average(parts.model)
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            average.update()
            parts.step()


def has_a_trainer(parts: Parts) -> None:
    Trainer(parts).train()


def calls_a_function(parts: Parts) -> None:
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            call()
            parts.step()


def keeps_nothing(parts: Parts) -> None:
    begun, device, names, world = 0.0, torch.device("cpu"), ["a"], parts.world

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return parts.model(x).sum() * world.world_size

    for epoch in parts.checkpoint.epochs(2):
        total = 0.0
        for i, (x,) in enumerate(parts.shard, start=parts.shard.step + 1):
            x = x.to(device)
            loss = loss_of(x)
            if i == 1:
                total = loss.item()
            parts.step()
        world.print(names[0], epoch, total, begun, loss.item())


class RaisingError(Exception):
    pass


class Hostile:
    """Of the script, and in its loop."""

    def __init__(self) -> None:
        self.mean = math.nan

    def __repr__(self) -> str:
        raise RaisingError

    def __getattr__(self, name: str) -> Any:
        raise RaisingError


def has_hostile_objects(parts: Parts) -> None:
    one, several = Hostile(), {Hostile(): 1}
    for _ in parts.checkpoint.epochs(2):
        for _ in parts.shard:
            len(several), one.mean
            parts.step()


def calls_a_function_for_each_epoch(parts: Parts) -> None:
    def one_epoch(epoch: int, noise: torch.Tensor, shown: list[int]) -> None:
        order = torch.randperm(2)
        for _ in parts.shard:
            shown.append(epoch)
            one_step(noise + order, 1)

    def one_step(noise: torch.Tensor, number: int) -> None:
        noise.add_(number)
        del number
        parts.step()

    shown = list[int]()
    for epoch in parts.checkpoint.epochs(2):
        one_epoch(epoch, torch.rand(2), shown)


def reads_its_shard_by_hand(parts: Parts) -> None:
    def batches() -> Iterator[Any]:
        yield from parts.shard

    for _ in parts.checkpoint.epochs(2):
        for _ in batches():
            parts.step()


SAID = {
    keeps_numbers: [CARRIES.format("best, total, waited")],
    draws_itself: [CHANGES.format("fourth, one, other, third")],
    reads_another_iterator: [CARRIES.format("numbers")],
    fills_containers: [CARRIES.format("means"), CHANGES.format("losses, options, seen")],
    replaces_its_loss: [CARRIES.format("criterion, is_noisy")],
    has_objects_in_containers: [CHANGES.format("means['ce'].mean")],
    has_an_engine: [CHANGES.format("Engine.callbacks[1].mean")],
    has_functions_with_a_memory: [
        "layers, their hooks or parameters were replaced: model",
        CHANGES.format("model's hook hook.mean, ramp.made, smooth(bank)"),
    ],
    reads_through_a_generator: [CARRIES.format("sigma")],
    has_partials_and_bound_methods: [CHANGES.format("draw, grow['bank'], noise.func, sums")],
    has_more_hooks: [CHANGES.format("model's hook of_weight.counts, optimizer's hook of_step.means")],
    fills_lists_in_each_epoch: [CHANGES.format("features")],
    decays_in_a_class: [CHANGES.format("Levels.level")],
    averages: [CHANGES.format("average.shadow, average.updates")],
    has_a_trainer: [CHANGES.format("Trainer.made, Trainer.steps")],
    calls_a_function: [CARRIES.format("calls")],
    calls_a_function_for_each_epoch: [CHANGES.format("shown")],
    has_hostile_objects: [],
    keeps_nothing: [CARRIES.format("total")],
    reads_its_shard_by_hand: [],
}


def calls_a_module(parts: Parts, helper: Any) -> None:
    for _ in parts.checkpoint.epochs(1):
        for _ in parts.shard:
            helper.note()
            parts.step()


def test_variables_of_another_module_are_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_mine.py").write_text("made = 0\n\n\ndef note():\n    global made\n    made += 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    helper = importlib.import_module("helper_of_mine")
    calls_a_module(Parts(world, tmp_path / "run"), helper)
    (said,) = [one.getMessage() for one in caplog.records]
    assert CHANGES.format("helper.made") in said


@pytest.mark.parametrize("train", SAID)
def test_what_a_script_keeps_is_named_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Callable[[Parts], None]
) -> None:
    train(Parts(world, tmp_path / "run"))
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == len(SAID[train])
    for words, one in zip(SAID[train], said):
        assert words in one


def test_variables_in_a_part_are_restored_and_not_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int) -> SimpleNamespace:
        shown = list[int]()
        kept = SimpleNamespace(best=math.inf, shown=shown, means=torch.zeros(2), rng=(rng := random.Random(1)))
        kept.window, kept.grown, kept.norms = deque([0], maxlen=2), torch.zeros(0), np.zeros(0)
        parts = Parts(world, tmp_path / "run", kept=kept)
        for epoch in parts.checkpoint.epochs(2):
            for _ in parts.shard:
                kept.best = min(kept.best, 10 - parts.checkpoint.steps)
                kept.shown.append(epoch)
                len(shown), rng.random()  # by the script's own names
                kept.means += 1
                kept.window.append(epoch)
                kept.grown = torch.cat([kept.grown, torch.ones(1)])
                kept.norms = np.append(kept.norms, 1.0)
                parts.step()
                if parts.checkpoint.steps == steps:
                    return kept
        return kept

    train(4)
    kept = train(6)
    assert (kept.best, kept.shown, kept.means.tolist()) == (5, [0, 0, 0, 1, 1, 1], [6, 6])
    assert (kept.window, kept.grown.shape, kept.norms.shape) == (deque([1, 1], maxlen=2), (6,), (6,))
    assert not caplog.records


def drawn(one: SimpleNamespace) -> list[object]:
    """Numbers of each kind of generator, and what an array has."""
    return [
        *(torch.rand(1, generator=one.torch).item(), one.python.random(), one.python.gauss(0, 1)),
        *(one.numpy.random(), one.numpy.integers(9), one.old.rand(), one.old.randn(), one.philox.random()),
        *(one.sfc.integers(9, dtype=np.int32), one.array.tolist(), one.array.dtype),
    ]


def test_generators_and_arrays_in_a_part_are_set_again(world: World, tmp_path: Path) -> None:
    def train(steps: int) -> list[list[object]]:
        kept = SimpleNamespace(
            torch=torch.Generator().manual_seed(3),
            python=random.Random(3),
            numpy=np.random.default_rng(3),
            old=np.random.RandomState(3),
            philox=np.random.Generator(np.random.Philox(3)),
            sfc=np.random.Generator(np.random.SFC64(3)),
            array=np.arange(3, dtype=np.float16),
        )
        parts, found = Parts(world, tmp_path / str(steps), kept=kept), list[list[object]]()
        for _ in parts.checkpoint.epochs(2):
            for _ in parts.shard:
                found.append(drawn(kept))
                kept.array += 1
                parts.step()
                if parts.checkpoint.steps == steps:
                    return found
        return found

    undisturbed = train(6)
    before = train(2)
    (tmp_path / "2").rename(tmp_path / "6x")
    (tmp_path / "6").rename(tmp_path / "done")
    (tmp_path / "6x").rename(tmp_path / "6")
    assert before + train(6) == undisturbed


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights, and an optimizer inside, in no state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]
        self.made = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.made += 1
        for slow, one in zip(self.slow, self.param_groups[0]["params"]):
            slow.lerp_(one.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "made": self.made.item()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.made = torch.tensor(state_dict["made"])


def test_tensors_and_optimizers_in_a_part_that_its_state_lacks_are_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Lookahead(model.parameters())
    shard = world.shard(TensorDataset(torch.ones(12, 2)), batch_size=4)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=tmp_path, every="1steps", **given)
    for _ in checkpoint.epochs(1):
        for (x,) in shard:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            checkpoint.step()
    named = [name for name in ("inner", "slow", "made") if f"optimizer.{name} changes, and the state_" in caplog.text]
    assert named == ["inner", "slow"]


class OfAnotherForm(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict(), "slow": []}


def test_an_optimizer_whose_state_has_another_form_is_refused(world: World, tmp_path: Path) -> None:
    optimizer = OfAnotherForm(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"is a OfAnotherForm, whose state_dict\(\) lacks 'state', 'param_groups'"
    ):
        Parts(world, tmp_path, optimizer=optimizer)


@pytest.mark.parametrize("form", [lambda one: one, lambda one: {"alpha": one}, lambda one: [[0.0, one]]])
def test_a_tensor_that_trains_without_a_module_is_filled_by_a_resume(
    world: World, tmp_path: Path, form: Callable[[torch.Tensor], Any]
) -> None:
    """Its optimizer, and the loop, have the script's own: soft actor-critic's temperature."""

    def train(run: str, steps: int) -> list[float]:
        alpha = torch.zeros(2, requires_grad=True)
        temperature = torch.optim.Adam([alpha], 0.1)
        parts = Parts(world, tmp_path / run, temperature=temperature, kept=SimpleNamespace(alpha=form(alpha)))
        for _ in parts.checkpoint.epochs(2):
            for _ in parts.shard:
                temperature.zero_grad()
                (alpha.exp() + 0.5 * alpha).sum().backward()
                temperature.step()
                parts.step()
                if parts.checkpoint.steps == steps:
                    break
            if parts.checkpoint.steps == steps:
                break
        return [parts.checkpoint.steps, *alpha.tolist()]

    undisturbed = train("whole", 6)
    train("stopped", 2)
    assert train("stopped", 6) == undisturbed


class KeepsANamespace:
    """A meter whose state is in a namespace, which others have, too."""

    def __init__(self, **values: Any) -> None:
        self.kept = SimpleNamespace(**values)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.kept.rng.bit_generator.state, "losses": torch.from_numpy(self.kept.losses.copy())}

    def load_state_dicts(self, states: Any) -> None:
        self.kept.rng.bit_generator.state = states[0]["rng"]
        self.kept.losses[:] = states[0]["losses"].numpy()


class Draws:
    def __init__(self) -> None:
        self.rng, self.losses = np.random.default_rng(0), np.ones(5)

    def draw(self) -> None:
        self.losses[self.rng.choice(5)] += 1.0


def test_what_a_meter_has_in_a_namespace_is_saved(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int) -> list[float]:
        draws = Draws()
        meter = KeepsANamespace(rng=draws.rng, losses=draws.losses)
        parts = Parts(world, tmp_path / "run", meters={"draws": meter})
        for _ in parts.checkpoint.epochs(2):
            for _ in parts.shard:
                draws.draw()
                parts.step()
                if parts.checkpoint.steps == steps:
                    return draws.losses.tolist()
        return draws.losses.tolist()

    train(4)
    resumed, whole = train(6), Draws()
    for _ in range(6):
        whole.draw()
    assert resumed == whole.losses.tolist()
    assert not caplog.records


@pytest.mark.parametrize("given", [0.0, None, [], Average(nn.Linear(1, 1))])
def test_a_part_without_a_state_is_refused(world: World, tmp_path: Path, given: object) -> None:
    words = r"Saving the part 'kept'.*has no state_dict\(\).*types.SimpleNamespace\(best=0.0\)"
    with pytest.raises(SpecError, match=f"(?s){words}"):
        Parts(world, tmp_path / "run", kept=given)
