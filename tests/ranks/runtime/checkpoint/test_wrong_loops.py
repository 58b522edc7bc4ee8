"""Loops that a resume could not continue, or would train wrongly: each is exact, refused or said; none is silent.

Over DDP, FSDP and streams, with one rank and with two. docs/explanation/exact-resume.md tells users of them.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cluster_ddp
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.runtime.data.batch_iterator import BatchIterator
from cluster_ddp.runtime.model.ddp import unwrapped

JOB_ID = job_ids()
SAMPLES = 24  # six batches on one rank, three on two
KINDS = ("ddp", "fsdp", "stream")
LATER = [pytest.param(kind, count, marks=pytest.mark.full) for kind in KINDS for count in (1, 2) if kind != "ddp"]
PARTS = 3
"""So many tests share the loops: a limit is for some trainings, not for sixty."""


class Loop:
    """A training: its parts, and one step of it."""

    def __init__(self, world: cluster_ddp.World, kind: str, run_dir: Path) -> None:
        self.world, self.kind, self.run_dir = world, kind, run_dir
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2))  # the smallest gradient comes last
        self.model = world.wrap(net, strategy="fsdp", blocks=nn.Linear) if kind == "fsdp" else world.wrap(net)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.shard = self.data()

    def data(self) -> BatchIterator:
        rows = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(2))
        if self.kind == "stream":
            return self.world.stream(list(rows), batch_size=4)
        return self.world.shard(TensorDataset(rows), batch_size=4, shuffle_seed=1)

    def checkpointer(self, *, shard: Any = "its own", **more: Any) -> cluster_ddp.Checkpointer:
        parts = {"model": self.model, "optimizer": self.optimizer, **more}
        own = self.shard if shard == "its own" else shard
        return cluster_ddp.Checkpointer(self.world, shard=own, run_dir=self.run_dir, **parts)

    def update(self, batch: Any) -> None:
        self.backward(batch)
        self.optimizer.step()

    def backward(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()

    def loss(self, batch: Any) -> torch.Tensor:
        rows = batch if isinstance(batch, torch.Tensor) else batch[0]
        return self.model(rows).square().mean()


def right(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
        for _ in loop.data():  # an evaluation
            pass
    for _ in loop.shard:  # and one behind the loop
        pass


def without_epochs(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in range(2):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()


def two_passes_in_an_epoch(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in itertools.chain(loop.shard, loop.shard):
            loop.update(batch)
            checkpoint.step()


def epochs_twice(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in (*checkpoint.epochs(1), *checkpoint.epochs(2)):
        pass


def no_step(loop: Loop) -> None:
    for _ in loop.checkpointer().epochs(2):
        for batch in loop.shard:
            loop.update(batch)


def step_twice(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
            checkpoint.step()


def step_before_the_optimizers(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.backward(batch)
            checkpoint.step()
            loop.optimizer.step()


def left_by_break(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
            break


def some_left_out_by_continue(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            if loop.shard.step == 1:
                continue
            loop.update(batch)
            checkpoint.step()


def until_in_epochs(loop: Loop) -> None:
    checkpoint = loop.checkpointer(shard=None)
    for _ in range(2):
        for _ in checkpoint.until(3):
            loop.update(torch.randn(4, 2))
            checkpoint.step()


def step_twice_in_until(loop: Loop) -> None:
    checkpoint = loop.checkpointer(shard=None)
    for _ in checkpoint.until(3):
        loop.update(torch.randn(4, 2))
        checkpoint.step()
        checkpoint.step()


def no_loop_of_steps(loop: Loop) -> None:
    checkpoint = loop.checkpointer(shard=None)
    loop.update(torch.randn(4, 2))
    checkpoint.step()


def read_again_in_an_epoch(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
            next(iter(loop.shard))


def read_before_the_loop(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in loop.shard:  # such as for the mean of the data
        pass
    for _ in checkpoint.epochs(1):
        pass


def evaluates_on_another_shard_of_it(loop: Loop) -> None:
    other = loop.data()
    checkpoint = loop.checkpointer(shard=[loop.shard, other])
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            for _ in other:
                pass
            checkpoint.step()


def a_list_of_the_batches(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in list(loop.shard):
            loop.update(batch)
            checkpoint.step()


def reads_a_batch_ahead(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        batches = iter(loop.shard)
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            loop.update(batch)
            checkpoint.step()
            batch = following


def read_in_a_thread(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    with ThreadPoolExecutor(1) as reader:
        for _ in checkpoint.epochs(1):
            batches = iter(loop.shard)
            while (batch := reader.submit(next, batches, None).result()) is not None:
                loop.update(batch)
                checkpoint.step()


def a_second_shard(loop: Loop) -> None:
    other = loop.data()
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch, _ in zip(loop.shard, other):
            loop.update(batch)
            checkpoint.step()


def a_loader(loop: Loop) -> None:
    others = DataLoader(TensorDataset(torch.randn(SAMPLES, 2)), batch_size=4)
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch, _ in zip(loop.shard, others):
            loop.update(batch)
            checkpoint.step()


def with_a_second_epochs(loop: Loop, make: Callable[[], Callable[[], object]]) -> None:
    checkpoint = loop.checkpointer()
    for epoch in checkpoint.epochs(2):
        step = make() if epoch == 1 else lambda: None
        for batch in loop.shard:
            loop.update(batch)
            step()
            checkpoint.step()


def a_second_epochs_loader(loop: Loop) -> None:
    def make() -> Callable[[], object]:
        others = iter(DataLoader(TensorDataset(torch.randn(SAMPLES, 2)), batch_size=2))
        return lambda: next(others)

    with_a_second_epochs(loop, make)


def a_second_epochs_scheduler(loop: Loop) -> None:
    with_a_second_epochs(loop, lambda: lr_scheduler.StepLR(loop.optimizer, 2).step)


def a_loader_in_until(loop: Loop) -> None:
    checkpoint = loop.checkpointer(shard=None)
    batches = iter(DataLoader(TensorDataset(torch.randn(SAMPLES, 2)), batch_size=4))
    for _ in checkpoint.until(3):
        loop.update(next(batches))
        checkpoint.step()


def steps_with(loop: Loop, step: Callable[[], None], **parts: Any) -> None:
    checkpoint = loop.checkpointer(**parts)
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            step()
            checkpoint.step()


def a_stream_of_a_loader(loop: Loop) -> None:
    torch.manual_seed(loop.world.rank)  # each rank has a share of its own
    loader = DataLoader(TensorDataset(torch.randn(SAMPLES, 2)), batch_size=4)
    loop.shard = loop.world.stream(loader, batch_size=None)
    steps_with(loop, lambda: None)


def a_scheduler_that_is_no_part(loop: Loop) -> None:
    steps_with(loop, lr_scheduler.StepLR(loop.optimizer, 2).step)


def a_scheduler_in_a_scheduler(loop: Loop) -> None:
    """It is saved with the other one."""
    each = [
        torch.optim.lr_scheduler.ConstantLR(loop.optimizer, 0.5),
        lr_scheduler.StepLR(loop.optimizer, 2),
    ]
    scheduler = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, each, [2])
    steps_with(loop, scheduler.step, scheduler=scheduler)


def a_scheduler_that_steps_late(loop: Loop) -> None:
    scheduler = lr_scheduler.StepLR(loop.optimizer, 2)
    checkpoint = loop.checkpointer(scheduler=scheduler)
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
            scheduler.step()


def an_optimizer_that_is_no_part(loop: Loop) -> None:
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([other])

    def step() -> None:
        other.grad = torch.ones(2)
        optimizer.step()

    steps_with(loop, step)


def steps_that_end_with(loop: Loop, zero: Callable[[], None]) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.loss(batch).backward()
            loop.optimizer.step()
            zero()
            checkpoint.step()


def no_zero_grad(loop: Loop) -> None:
    steps_that_end_with(loop, lambda: None)


def zero_grad_in_place(loop: Loop) -> None:
    steps_that_end_with(loop, lambda: loop.optimizer.zero_grad(set_to_none=False))


def zero_grad_of_the_model(loop: Loop) -> None:
    steps_that_end_with(loop, loop.model.zero_grad)


def updates_of_three_batches(loop: Loop, zero: Callable[[bool], None]) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            with loop.world.accumulate(loop.model, loop.shard, every=3) as is_last:
                zero(False)
                loop.loss(batch).backward()
            if is_last:
                loop.optimizer.step()
                zero(True)
                checkpoint.step()


def zero_grad_for_each_batch(loop: Loop) -> None:
    updates_of_three_batches(loop, lambda _: loop.optimizer.zero_grad())


def zero_grad_in_place_for_each_batch(loop: Loop) -> None:
    updates_of_three_batches(loop, lambda _: loop.optimizer.zero_grad(set_to_none=False))


def zero_grad_for_each_update(loop: Loop) -> None:
    updates_of_three_batches(loop, lambda is_over: loop.optimizer.zero_grad() if is_over else None)


def zero_grad_in_place_for_each_update(loop: Loop) -> None:
    updates_of_three_batches(loop, lambda is_over: loop.optimizer.zero_grad(set_to_none=False) if is_over else None)


def steps_in_float16(loop: Loop, *, unscales: bool) -> None:
    scaler = loop.world.grad_scaler(torch.float16)
    checkpoint = loop.checkpointer(scaler=scaler)
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.optimizer.zero_grad()
            scaler.scale(loop.loss(batch)).backward()
            if unscales:
                scaler.unscale_(loop.optimizer)
            loop.world.clip_grad_norm(loop.model, 1.0)
            scaler.step(loop.optimizer)
            scaler.update()
            checkpoint.step()


def clipped_before_unscale(loop: Loop) -> None:
    steps_in_float16(loop, unscales=False)


def clipped_after_unscale(loop: Loop) -> None:
    steps_in_float16(loop, unscales=True)


def weights_loaded_late(loop: Loop) -> None:
    weights = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.update(torch.ones(4, 2))
    checkpoint = loop.checkpointer()
    loop.model.load_state_dict(weights)
    for _ in checkpoint.epochs(1):
        pass


def a_parameter_of_no_part(loop: Loop) -> None:
    temperature = nn.Parameter(torch.ones(3))
    loop.optimizer.add_param_group({"params": [temperature]})
    steps_with(loop, lambda: None)


def a_temperature_in_a_part(loop: Loop) -> None:
    scale = nn.ParameterDict({"temperature": nn.Parameter(torch.ones(3))})
    loop.optimizer.add_param_group({"params": scale.parameters()})
    steps_with(loop, lambda: None, scale=scale)


def a_buffer_that_is_not_persistent(loop: Loop) -> None:
    net = unwrapped(loop.model)
    seen, constant = torch.zeros(1), torch.zeros(1)
    net.register_buffer("seen", seen, persistent=False)
    net.register_buffer("constant", constant, persistent=False)
    steps_with(loop, lambda: seen.add_(1))


def trained_in_eval_mode(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
        unwrapped(loop.model).eval()


def evaluated_in_eval_mode(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            loop.update(batch)
            loop.model.eval()
            loop.model.train()
            checkpoint.step()
        loop.model.eval()
        loop.model.train()


def moments_loaded_late(loop: Loop) -> None:
    loop.update(torch.ones(4, 2))
    checkpoint = loop.checkpointer()
    for state in loop.optimizer.state.values():
        state["step"].zero_()
    for _ in checkpoint.epochs(1):
        pass


def a_learning_rate_set_late(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    loop.optimizer.param_groups[0]["lr"] /= 2
    for _ in checkpoint.epochs(1):
        pass


def a_second_checkpointer(loop: Loop) -> None:
    for _ in loop.checkpointer().epochs(1):
        for _ in loop.shard:
            loop.checkpointer()


def a_shard_of_other_ranks(loop: Loop) -> None:
    loop.shard.world_size += 1
    loop.checkpointer()


def best_within(loop: Loop, *, before_step: bool) -> None:
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            if before_step:
                checkpoint.best("loss", 1.0, mode="min")
            loop.update(batch)
            checkpoint.step()
            checkpoint.best("loss", 1.0, mode="min")


def best_before_a_step(loop: Loop) -> None:
    best_within(loop, before_step=True)


def best_after_each_step(loop: Loop) -> None:
    best_within(loop, before_step=False)


def a_parameter_group_added_late(loop: Loop) -> None:
    head = loop.world.wrap(nn.Linear(2, 2))
    checkpoint = loop.checkpointer(head=head)
    for epoch in checkpoint.epochs(2):
        if epoch == 1:
            loop.optimizer.add_param_group({"params": head.parameters()})
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()


def a_checkpointer_for_each_model(loop: Loop) -> None:
    head = loop.world.wrap(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    checkpoint, run_dir = loop.checkpointer(), loop.run_dir.with_name("head")
    other = cluster_ddp.Checkpointer(loop.world, run_dir=run_dir, model=head, optimizer=optimizer)
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
            other.step()


def with_labelled(loop: Loop, batches: Callable[[BatchIterator, BatchIterator], Any]) -> None:
    """A second shard is shorter: two batches on one rank, one on two."""
    rows = torch.randn(8, 2, generator=torch.Generator().manual_seed(3))
    labelled = loop.world.shard(TensorDataset(rows), batch_size=4)
    checkpoint = loop.checkpointer(shard=[loop.shard, labelled])
    for _ in checkpoint.epochs(2):
        for batch in batches(loop.shard, labelled):
            loop.update(batch)
            checkpoint.step()


def a_shorter_shard_cycled(loop: Loop) -> None:
    with_labelled(loop, lambda shard, labelled: (one for one, _ in zip(shard, itertools.cycle(labelled))))


def as_long_as_the_shorter_shard(loop: Loop) -> None:
    with_labelled(loop, lambda shard, labelled: (one for _, one in zip(labelled, shard)))


def one_shard_after_the_other(loop: Loop) -> None:
    with_labelled(loop, itertools.chain)


def sampled(loop: Loop, sampler: Callable[[int, int], list[int]], after_step: Callable[[], object] = int) -> None:
    rows = TensorDataset(torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(2)))
    loop.shard = loop.world.shard(rows, batch_size=4, sampler=sampler)
    checkpoint = loop.checkpointer()
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            loop.update(batch)
            after_step()
            checkpoint.step()


def a_sampler_with_a_state(loop: Loop) -> None:
    """As the hardest samples first, by the weights of now."""
    calls = itertools.count()

    def rolled(seed: int, epoch: int) -> list[int]:
        first = next(calls)
        return [(one + first) % SAMPLES for one in range(SAMPLES)]

    sampled(loop, rolled)


def a_sampler_of_seed_and_epoch(loop: Loop) -> None:
    sampled(loop, lambda seed, epoch: [(one + epoch) % SAMPLES for one in range(SAMPLES)])


def a_sampler_that_seeds(loop: Loop) -> None:
    """It sets all random numbers: to look at its order again changes none of them."""

    def draw(seed: int, epoch: int) -> list[int]:
        torch.manual_seed(epoch)
        return [int(one) for one in torch.randperm(SAMPLES)]

    numbers = set[float]()
    sampled(loop, draw, lambda: numbers.add(float(torch.rand(()))))
    assert len(numbers) == 2 * len(loop.shard)


def scaled(loop: Loop, by: torch.amp.GradScaler, **parts: Any) -> None:
    checkpoint = loop.checkpointer(**parts)
    for _ in checkpoint.epochs(1):
        for batch in loop.shard:
            loop.optimizer.zero_grad()
            by.scale(loop.loss(batch)).backward()
            by.step(loop.optimizer)
            by.update()
            checkpoint.step()


def a_scaler_that_is_no_part(loop: Loop) -> None:
    scaled(loop, torch.amp.GradScaler("cpu"))


def a_scaler_that_is_a_part(loop: Loop) -> None:
    scaled(loop, scaler := torch.amp.GradScaler("cpu"), scaler=scaler)


def a_scaler_that_is_off(loop: Loop) -> None:
    scaled(loop, torch.amp.GradScaler("cpu", enabled=False))


def two_phases_in_one_run_directory(loop: Loop) -> None:
    right(loop)
    loop.shard = loop.data()
    right(loop)


def two_phases(loop: Loop) -> None:
    right(loop)
    loop.shard, loop.run_dir = loop.data(), loop.run_dir / "fine-tuning"
    right(loop)


def an_optimizer_in_place_of_a_part(loop: Loop) -> None:
    checkpoint = loop.checkpointer()
    for epoch in checkpoint.epochs(2):
        if epoch == 1:
            loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()


def changing(loop: Loop, name: str, values: Sequence[object]) -> None:
    layer = unwrapped(loop.model)[1]
    vars(layer)[name] = values[0]
    checkpoint = loop.checkpointer()
    for epoch in checkpoint.epochs(2):
        vars(layer)[name] = values[epoch]
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()


def beside(loop: Loop, other: nn.Module, change: Callable[[], object], **parts: Any) -> None:
    """Another module takes part in the training."""
    checkpoint = loop.checkpointer(**parts)
    for _ in checkpoint.epochs(2):
        for batch in loop.shard:
            other(torch.ones(4, 2))
            loop.update(batch)
            checkpoint.step()
            change()


def an_average_of_own_code(loop: Loop) -> None:
    teacher = nn.Linear(2, 2)
    beside(loop, teacher, lambda: teacher.weight.data.mul_(0.99))


def a_loss_with_a_buffer(loop: Loop) -> None:
    beside(loop, nn.Sequential(nn.BatchNorm1d(2)), lambda: None)


def a_loss_whose_margin_falls(loop: Loop) -> None:
    loss = nn.TripletMarginLoss(margin=2.0)
    beside(loop, nn.Identity(), lambda: vars(loss).update(margin=loss.margin / 2))


def a_loss_with_a_center(loop: Loop) -> None:
    loss = nn.Identity()
    loss.center = torch.zeros(2)

    def move() -> None:
        loss.center = loss.center * 0.9 + 0.1

    beside(loop, nn.Identity(), move)


def a_meter_that_is_no_part(loop: Loop) -> None:
    meter = cluster_ddp.Meter(loop.world)
    beside(loop, nn.Identity(), lambda: meter.add(torch.ones(()), 4))


def a_meter_that_is_a_part(loop: Loop) -> None:
    meter = cluster_ddp.Meter(loop.world)
    beside(loop, nn.Identity(), lambda: meter.add(torch.ones(()), 4), meters={"loss": meter})


def a_meter_of_evaluations(loop: Loop) -> None:
    meter, checkpoint = cluster_ddp.Meter(loop.world), loop.checkpointer()
    for _ in checkpoint.epochs(3):
        for batch in loop.shard:
            loop.update(batch)
            checkpoint.step()
        meter.reset()
        for _ in loop.data():
            meter.add(torch.ones(()), 4)


def an_optimizer_without_torchs_constructor(loop: Loop) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups, self.state = base, base.param_groups, base.state

    loop.checkpointer(lookahead=Lookahead(loop.optimizer))


class Counted(torch.optim.SGD):
    """Which counts its steps, and may save that."""

    saves = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.t = 7

    def step(self, closure: Any = None) -> None:
        self.t += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"t": self.t} if self.saves else {})


class CountedAndSaved(Counted):
    saves = True


def an_optimizers_own_count(loop: Loop) -> None:
    loop.optimizer = Counted(loop.model.parameters(), lr=0.01)
    beside(loop, nn.Identity(), lambda: None)


def an_optimizers_own_count_that_is_saved(loop: Loop) -> None:
    loop.optimizer = CountedAndSaved(loop.model.parameters(), lr=0.01)
    beside(loop, nn.Identity(), lambda: None)


def an_average_that_is_a_part(loop: Loop) -> None:
    teacher = nn.Linear(2, 2)
    beside(loop, teacher, lambda: teacher.weight.data.mul_(0.99), teacher=teacher)


def a_frozen_teacher(loop: Loop) -> None:
    """With NaN in it, and a part that has not been made."""
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    teacher[0].bias.data.fill_(float("nan"))
    teacher.register_module("never made", nn.Linear(2, 2, device="meta"))
    beside(loop, teacher[0], lambda: None)


def a_count_in_a_module(loop: Loop) -> None:
    changing(loop, "calls", [0, 1])


def changing_content(loop: Loop, value: Any, change: Callable[[Any], object]) -> None:
    vars(unwrapped(loop.model)[1])["seen"] = value
    steps_with(loop, lambda: change(value))


def a_list_in_a_module(loop: Loop) -> None:
    changing_content(loop, [{"last": [torch.ones(2)]}], lambda seen: seen[0]["last"][0].add_(1))


def an_array_in_a_module(loop: Loop) -> None:
    changing_content(loop, np.zeros(2), lambda seen: seen.__iadd__(1))


def a_generator_in_a_module(loop: Loop) -> None:
    changing_content(loop, torch.Generator(), lambda seen: torch.rand(1, generator=seen))


def constants_in_a_module(loop: Loop) -> None:
    """Such as an LSTM's list of its weights."""
    weight = next(loop.model.parameters())
    changing_content(loop, [weight, {1, 2}, (1, np.ones(2)), [None] * 2000, loop.optimizer], lambda seen: None)


def a_layer_replaced(loop: Loop) -> None:
    model = unwrapped(loop.model)
    steps_with(loop, lambda: setattr(model, "1", nn.Tanh()))


def a_hook_added(loop: Loop) -> None:
    layer = unwrapped(loop.model)[1]
    steps_with(loop, lambda: layer.register_forward_hook(lambda module, inputs, output: 2 * output))


def an_endless_loader(loop: Loop) -> None:
    class Endless(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return itertools.repeat(1.0)

    batches = iter(DataLoader(Endless(), batch_size=2))
    next(batches)
    steps_with(loop, lambda: next(batches))


def a_meter_without_its_methods(loop: Loop) -> None:
    loop.checkpointer(meters={"patience": loop.optimizer})


def a_number_in_a_module(loop: Loop) -> None:
    """A resume restores it: test_module_settings.py."""
    changing(loop, "temperature", [1.0, 0.5])


EXACT = ""
TABLE: dict[Callable[[Loop], None], str] = {
    right: EXACT,
    without_epochs: r"Step 1:\n  it is in no loop .*write for epoch in checkpoint\.epochs\(10\): for batch in shard",
    two_passes_in_an_epoch: r"Step [47]:\n  this is another pass over the shard in epoch 1",
    epochs_twice: r"Training for 2 epochs:\n  this Checkpointer has had its loop",
    no_step: r"optimizers made [36] steps, and checkpoint\.step\(\) was not called.*call checkpoint\.step\(\) after",
    step_twice: r"Step 2:\n  the step of this batch was counted already",
    step_before_the_optimizers: "there are gradients that no optimizer has used",
    left_by_break: "the loop over the shard was left after it",
    some_left_out_by_continue: EXACT,
    until_in_epochs: r"Training for 3 steps:\n  this Checkpointer has had its loop",
    step_twice_in_until: r"Step 2:\n  the step of this batch was counted already",
    no_loop_of_steps: r"Step 1:\n  it is in no loop .*write for done in checkpoint\.until",
    read_again_in_an_epoch: r"Reading the training's shard again in epoch 1, after [48] samples",
    read_before_the_loop: r"Training for 1 epoch:\n  the shard was read before",
    evaluates_on_another_shard_of_it: "a shard of the Checkpointer was read outside of this loop",
    a_list_of_the_batches: "a shard of the Checkpointer was read outside of this loop",
    reads_a_batch_ahead: ("carries variables from step to step: batch", "counted already.*read none ahead of it"),
    read_in_a_thread: r"Step 1:\n  another thread reads the shard, ahead of the training",
    a_second_shard: r"a (shard|stream) is read that is not the Checkpointer's.*shard=\[one, another\]",
    a_loader: "a DataLoader is read whose place is not saved",
    a_second_epochs_loader: "a DataLoader is read whose place is not saved",
    a_second_epochs_scheduler: "StepLR is a scheduler of a part, and is no part",
    a_stream_of_a_loader: EXACT,
    a_loader_in_until: (
        "carries variables from step to step: batches",
        "a DataLoader is read whose place is not saved",
    ),
    a_scheduler_that_is_no_part: "StepLR is a scheduler of a part, and is no part",
    a_scheduler_in_a_scheduler: EXACT,
    a_scheduler_that_steps_late: EXACT,
    an_optimizer_that_is_no_part: "Adam makes steps, and is no part of the Checkpointer",
    no_zero_grad: "used the gradients of the step before, too: they were not set to zero",
    zero_grad_in_place: EXACT,
    zero_grad_of_the_model: EXACT,
    zero_grad_for_each_batch: "zero_grad was called within the update: the gradients of its batches before are lost",
    zero_grad_in_place_for_each_batch: "zero_grad was called within the update",
    zero_grad_for_each_update: EXACT,
    zero_grad_in_place_for_each_update: EXACT,
    clipped_before_unscale: r"Clipping gradients:\n  they are 65536 times as large.*call scaler\.unscale_",
    clipped_after_unscale: EXACT,
    weights_loaded_late: r"Training for 1 epoch:\n  'model' has other weights than when the Checkpointer was made",
    a_parameter_of_no_part: r"'optimizer' trains 1 parameter of no part, of shape \[3\]\.|that no module here has",
    a_temperature_in_a_part: EXACT,
    a_buffer_that_is_not_persistent: r"model\.seen changes, and is a buffer that is not persistent",
    trained_in_eval_mode: "'model' is trained in eval mode, and was in training mode before",
    evaluated_in_eval_mode: EXACT,
    moments_loaded_late: r"Training for 1 epoch:\n  'optimizer' has other moments than when the Checkpointer was made",
    a_learning_rate_set_late: "'optimizer' has other settings than when the Checkpointer was made. A resume sets them",
    a_second_checkpointer: "another Checkpointer's loop is reading this shard",
    a_shard_of_other_ranks: "a shard is for rank",
    best_before_a_step: r"Keeping the best 'loss' in a batch:.*step is not counted yet.*after checkpoint\.step\(\)",
    best_after_each_step: EXACT,
    a_parameter_group_added_late: r"Adam has another parameter group since .*give all parameter groups .*with lr=0",
    a_shorter_shard_cycled: r"Step [23]:\n  one of the loop's shards has ended and another has not.*sampler=lambda",
    as_long_as_the_shorter_shard: EXACT,
    one_shard_after_the_other: EXACT,
    a_sampler_with_a_state: r"The sampler's order of epoch 1:\n  it was another one when the epoch began",
    a_sampler_of_seed_and_epoch: EXACT,
    a_sampler_that_seeds: EXACT,
    a_scaler_that_is_no_part: r"GradScaler scales the loss, and is no part of the Checkpointer.*scaler=scaler",
    a_scaler_that_is_a_part: EXACT,
    a_scaler_that_is_off: EXACT,
    two_phases_in_one_run_directory: "another training of this script has ended there.*fine-tuning",
    two_phases: EXACT,
    an_optimizer_in_place_of_a_part: "SGD makes steps, and is no part of the Checkpointer",
    a_list_in_a_module: r"attributes of modules change: model\.1\.seen\.",
    an_array_in_a_module: r"attributes of modules change: model\.1\.seen\.",
    a_generator_in_a_module: r"attributes of modules change: model\.1\.seen\.",
    constants_in_a_module: EXACT,
    a_layer_replaced: r"layers, their hooks or parameters were replaced: model\.1\.",
    a_hook_added: r"layers, their hooks or parameters were replaced: model\.1\.",
    an_endless_loader: "a DataLoader is read whose place is not saved",
    a_meter_without_its_methods: r"Saving 'patience' of each rank.*which has no state_dict\(\) and load_state_dicts",
    an_average_of_own_code: "Linear has weights, buffers or numbers that change, and is no part of the Checkpointer",
    a_loss_with_a_buffer: "Sequential has weights, buffers or numbers that change, and is no part of the Checkpointer",
    a_loss_whose_margin_falls: "TripletMarginLoss has weights, buffers or numbers that change, and is no part of the",
    a_loss_with_a_center: "Identity has weights, buffers or numbers that change, and is no part of the Checkpointer",
    a_meter_that_is_no_part: r"a Meter adds up the steps of the loop, and is not in meters.*meters=\{'loss': meter\}",
    a_meter_that_is_a_part: EXACT,
    a_meter_of_evaluations: EXACT,
    an_optimizer_without_torchs_constructor: r"lookahead is a Lookahead, which has not called.*super\(\)\.__init__",
    an_optimizers_own_count: r"optimizer\.t changes, and the state_dict\(\) of that part lacks it",
    an_optimizers_own_count_that_is_saved: EXACT,
    an_average_that_is_a_part: EXACT,
    a_frozen_teacher: EXACT,
    a_count_in_a_module: EXACT,  # it is set in each epoch; else a resume says so: test_module_settings.py
    a_number_in_a_module: EXACT,
    a_checkpointer_for_each_model: r"Step 1:\n  the loop of another Checkpointer runs.*give all parts .* to one",
}
"""Each loop, and what is said of it, as an error or in the log."""
EXACT_WITH_FSDP = zero_grad_for_each_batch, zero_grad_in_place_for_each_batch
"""It adds up an update's gradients where zero_grad does not reach them."""


class Said(logging.Handler):
    """What the package says at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is still being written" not in (words := record.getMessage()):  # a slow disk's
            self.words.append(words)


def heard() -> None:
    """Run all loops, each in a run directory of its own; leave what was said of each."""
    folder, kind = Path(os.environ["FOLDER"]), os.environ["KIND"]
    with cluster_ddp.distributed(cuda=False) as world:
        found = {}
        for loop in [*TABLE][int(os.environ["PART"]) :: PARTS]:
            said = Said()
            logging.getLogger("cluster_ddp").addHandler(said)
            try:
                loop(Loop(world, kind, folder / f"{loop.__name__} run"))
            except ClusterDDPError as error:
                said.words.append(str(error))
            logging.getLogger("cluster_ddp").removeHandler(said)
            gc.collect()  # the next training looks through all objects
            found[loop.__name__] = said.words
        (folder / f"said-{world.rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("kind", "count"), [pytest.param("ddp", 1, marks=pytest.mark.full), ("ddp", 2), *LATER])
def test_no_loop_trains_wrongly_without_a_word(tmp_path: Path, kind: str, count: int, part: int) -> None:
    env = {"FOLDER": str(tmp_path), "KIND": kind, "PART": str(part)}
    steps = [slurm_step(rank, count, job_id=JOB_ID + KINDS.index(kind), **env) for rank in range(count)]
    for end in run_ranks(heard, steps, tmp_path):
        assert end.exit_code == 0, end.output
    said = json.loads((tmp_path / "said-0.json").read_text())
    silent = {}
    for loop, expected in [*TABLE.items()][part::PARTS]:
        words = said[loop.__name__]
        expected = EXACT if kind == "fsdp" and loop in EXACT_WITH_FSDP else expected
        wanted = expected if isinstance(expected, tuple) else (expected,) if expected else ()
        if len(words) != len(wanted) or not all(re.search(*pair, re.DOTALL) for pair in zip(wanted, words)):
            silent[loop.__name__] = words
    assert not silent
