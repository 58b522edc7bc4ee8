"""What a checkpoint can't have of a training is said once, with its step; a training without that hears nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact_resume import Point, equal_after_kill
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import Dataset, Subset, TensorDataset

import cluster_ddp
from cluster_ddp import World
from cluster_ddp.runtime.checkpoint.exactness import state_digest
from cluster_ddp.runtime.checkpoint.exactness.module_settings import ModuleSettings
from cluster_ddp.runtime.checkpoint.exactness.rank_differences import RankDifferences
from cluster_ddp.runtime.checkpoint.exactness.unsaved import Unsaved

JOB_ID = job_ids()
ALONE: Any = SimpleNamespace(synchronize=int)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class Memory:
    """Numbers that each rank draws itself."""

    def __init__(self) -> None:
        self.order = torch.arange(20)

    def draw(self, rank: int) -> None:
        self.order = torch.randperm(20, generator=torch.Generator().manual_seed(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        self.order = states[0]["order"] if states else self.order


class Training:
    """Three steps an epoch, on two ranks, with a checkpoint after each."""

    def __init__(self, world: World, name: str, model: nn.Module, **options: Any) -> None:
        self.world, self.model = world, model
        self.optimizer = torch.optim.SGD(list(model.parameters()), 0.1, momentum=0.9)
        data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
        self.shard = world.shard(data, batch_size=4, shuffle_seed=3)
        world.seed_rank(2)
        parts: dict[str, Any] = {"model": model, "optimizer": self.optimizer, **options}
        run_dir = Path(os.environ["RUNS"], name) if "RUNS" in os.environ else None
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=self.shard, run_dir=run_dir, every="1steps", **parts)

    def run(
        self, epochs: int = 2, *, epoch_begins: Callable[[int], object] = int, last: Callable[[], object] = int
    ) -> None:
        for epoch in self.checkpoint.epochs(epochs):
            epoch_begins(epoch)
            for x, y in self.shard:
                self.update(x, y)
                last()
                self.end_step()

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.backward(x, y)
        self.optimizer.step()

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()

    def end_step(self) -> None:
        self.checkpoint.step()
        self.checkpoint._saver.wait()  # else the next save may be skipped


def nothing_to_say(world: World) -> None:
    """Ranks that may differ: in buffers, in meters, in parts of rank 0 alone; a hook without a state."""
    model = world.wrap(mlp(), broadcast_buffers=False)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    memory = Memory()
    memory.draw(world.rank)
    of_main = {"average": average} if world.is_main else {}
    (one,) = alone = nn.ParameterList([torch.ones(1)])
    lbfgs = torch.optim.LBFGS([one], max_iter=2)
    training = Training(world, "nothing_to_say", model, meters={"memory": memory}, lbfgs=lbfgs, alone=alone, **of_main)

    def own_loss() -> float:
        one.grad = torch.ones(1)
        return float(world.rank)

    for _ in training.checkpoint.epochs(2):
        for x, y in training.shard:
            if training.shard.step == 2:
                break  # before it is trained
            training.update(x, y)
            average.update_parameters(model.module)
            lbfgs.step(own_loss)
            training.end_step()


def unfreeze_late(world: World) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    Training(world, "unfreeze_late", wrapped).run(epoch_begins=lambda epoch: model[0].requires_grad_(epoch == 1))


def localsgd(world: World) -> None:
    model = world.wrap(mlp(), broadcast_buffers=False)
    training = Training(world, "localsgd", model)

    def average() -> None:
        if training.checkpoint.steps == 3:
            for one in model.parameters():
                one.data.copy_(world.all_reduce(one.data) / world.world_size)

    with model.no_sync():
        training.run(last=average)


def partdiff(world: World) -> None:
    memory = Memory()
    training = Training(world, "partdiff", world.wrap(mlp()), memory=memory)
    training.run(epoch_begins=lambda epoch: memory.draw(world.rank if epoch else 0))


def powersgd(world: World) -> None:
    model = world.wrap(mlp())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    Training(world, "powersgd", model).run()


def manual_acc(world: World) -> None:
    training = Training(world, "manual_acc", world.wrap(mlp()))
    for _ in training.checkpoint.epochs(2):
        for number, (x, y) in enumerate(training.shard):
            training.backward(x, y)
            if number != 1:
                training.optimizer.step()
                training.optimizer.zero_grad()
            training.end_step()


def break_early(world: World) -> None:
    training = Training(world, "break_early", world.wrap(mlp()))
    for _ in training.checkpoint.epochs(2):
        for x, y in training.shard:
            training.update(x, y)
            training.end_step()
            if training.shard.step == 1:
                break


def ema_forgotten(world: World) -> None:
    model = world.wrap(mlp())
    average = torch.optim.swa_utils.AveragedModel(model.module)
    Training(world, "ema_forgotten", model).run(last=lambda: average.update_parameters(model.module))


def scheduler_alone(world: World) -> None:
    """Its state has nothing of its optimizer's."""
    other = torch.optim.SGD([(one := nn.Parameter(torch.ones(1)))], 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)

    def update() -> None:
        one.grad = torch.ones(1)
        other.step()
        scheduler.step()

    Training(world, "scheduler_alone", world.wrap(mlp()), scheduler=scheduler).run(last=update)


def apart(world: World) -> None:
    """Each rank splits the data by itself, and keeps the best of its own loss."""
    model = world.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.arange(384.0).view(48, 8), torch.zeros(48).long())
    part, _ = torch.utils.data.random_split(data, [24, 24], torch.Generator().manual_seed(world.rank))
    shard, run_dir = world.shard(part, batch_size=4), Path(os.environ["RUNS"], "apart")
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=run_dir, model=model, optimizer=optimizer)
    for _ in checkpoint.epochs(2):
        for x, y in shard:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpoint.step()
        checkpoint.best("loss", float(world.rank), mode="min")


TRAININGS = (
    *(nothing_to_say, unfreeze_late, localsgd, partdiff, powersgd, manual_acc, break_early),
    *(ema_forgotten, scheduler_alone, apart),
)
SAID = {
    "nothing_to_say": [],
    "unfreeze_late": [("Saving step 4:", f"'{name}' differs between ranks: rank 1 has", "At step 3 it was the same.")
                      for name in ("model", "optimizer")],
    "localsgd": [("Saving step 1:", f"'{name}' differs between ranks: rank 1 has") for name in ("model", "optimizer")],
    "partdiff": [("Saving step 4:", "'memory' differs between ranks", "At step 3 it was the same.", "in meters")],
    "powersgd": [("Saving step 1:", "'model' has a communication hook with a state, PowerSGDState.")],
    "manual_acc": [("Saving step 2:", "gradients that no optimizer has used", "world.accumulate")],
    "break_early": [("Ending epoch 1 at step 2:", "trains the rest of the epoch.", "first line")],
    "ema_forgotten": [("Saving step 2:", "AveragedModel has weights, buffers or numbers that change", "other=other")],
    "scheduler_alone": [("Saving step 1:", "SGD makes steps, and is no part of the Checkpointer.")],
    "apart": [("Saving step 3:", "rank 1 has another dataset than rank 0", "generator="),
              ("Keeping the best:", "best('loss', …) has another value on each rank", "world.mean")],
}  # fmt: skip


def all_trainings() -> None:
    said: dict[str, list[str]] = {}
    with cluster_ddp.distributed(cuda=False) as world:
        for training in TRAININGS:
            texts = said[training.__name__] = []
            handler = logging.Handler(logging.ERROR)
            handler.emit = lambda record, texts=texts: texts.append(record.getMessage())  # type: ignore
            logging.getLogger("cluster_ddp").addHandler(handler)
            training(world)
            logging.getLogger("cluster_ddp").removeHandler(handler)
    Path(os.environ["RUNS"], f"said-{world.rank}.json").write_text(json.dumps(said))


@pytest.mark.fault(
    "weights, or another part, differ between the ranks; the state of a communication hook, gradients of half an "
    "update, an epoch left after a step",
    "training continues; the log says once which part, on which ranks, since which step, and the cure",
    bound="the next save; of few elements in a large tensor, within 64 saves",
)
def test_what_no_checkpoint_has_is_said_once(tmp_path: Path) -> None:
    steps = [slurm_step(rank, 2, job_id=JOB_ID, RUNS=str(tmp_path)) for rank in range(2)]
    ends = run_ranks(all_trainings, steps, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    said = json.loads((tmp_path / "said-0.json").read_text())
    for name, expected in SAID.items():
        assert len(said[name]) == len(expected), said[name]
        for text, words in zip(said[name], expected):
            assert all(one in text for one in words), text
    assert not any(json.loads((tmp_path / "said-1.json").read_text()).values())


def breaks_before(world: World, point: Point) -> Mapping[str, Any]:
    model = world.wrap(mlp())
    training = Training(world, "breaks_before", model)
    for _ in training.checkpoint.epochs(3):
        for x, y in training.shard:
            if training.shard.step == 2:
                break
            training.update(x, y)
            training.end_step()
            point("after", training.checkpoint.steps)
    return {"model": model.state_dict(), "optimizer": training.optimizer.state_dict()}


@pytest.mark.full
def test_an_epoch_that_ends_before_a_batch_is_trained_ends_there_after_a_resume(tmp_path: Path) -> None:
    equal_after_kill(breaks_before, tmp_path, kill=("after", 4))


class State:
    """A part with this state."""

    def __init__(self, **state: Any) -> None:
        self.state_dict = lambda: state


def digest_of(save: int = 0, **state: Any) -> str:
    differences = RankDifferences(ALONE, {"part": State(**state)})
    return [differences.digests()["part"] for _ in range(save + 1)][-1]


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (4, 3, 5, 5), (9000,)], ids=str)
def test_each_element_and_its_place_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape, dtype=torch.uint8)
    digests = [digest_of(tensor=zeros.to(dtype))]
    for place in {0, zeros.numel() // 2, zeros.numel() - 1}:
        other = zeros.clone()
        other.view(-1)[place] = 1
        digests.append(digest_of(tensor=other.to(dtype)))
        assert digest_of(tensor=other.to(dtype)) == digests[-1]
    assert len({*digests}) == len(digests)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1.0}, {"a": 1.5}),
        ({"a": [1, "x"]}, {"a": [1, "y"]}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
        ({"a": torch.arange(6)}, {"a": torch.arange(6).flip(0)}),
        ({"a": torch.zeros(0, 2)}, {"a": torch.zeros(2, 0)}),
        ({"a": torch.zeros(1), "b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.zeros(1)}),
    ],
)
def test_other_states_have_other_digests(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest_of(**one) != digest_of(**other)
    assert digest_of(**one) == digest_of(**one)


def test_where_values_are_in_memory_does_not_matter() -> None:
    values = torch.randn(7)
    assert digest_of(tensor=values) == digest_of(tensor=torch.cat([torch.zeros(1), values])[1:])
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert digest_of(tensor=image) == digest_of(tensor=image.clone())
    assert digest_of(tensor=torch.ones(1).expand(9)) == digest_of(tensor=torch.ones(9))


def test_each_element_of_a_large_part_is_compared_now_and_then() -> None:
    size = 2 * state_digest._SMALL_BYTES + 4
    zeros = torch.zeros(size, dtype=torch.uint8)
    for place in (0, size // 2, size - 1):
        other = zeros.clone()
        other[place] = 1
        assert any(digest_of(save, tensor=zeros) != digest_of(save, tensor=other) for save in range(3))


def test_one_element_of_a_large_state_is_another_state() -> None:
    first = torch.zeros(2 * state_digest._SMALL_BYTES + 4, dtype=torch.uint8)
    digests = [state_digest.of_rank(ALONE, {"all": {"tensor": first}})]
    for place in (0, first.numel() // 2, first.numel() - 1):
        other = first.clone()
        other[place] = 1
        digests.append(state_digest.of_rank(ALONE, {"all": {"tensor": other}}))
    assert len({one["all"] for one in digests}) == len(digests)


def test_a_part_that_cannot_be_saved_is_not_compared() -> None:
    assert RankDifferences(ALONE, {"part": State(what=object())}).digests() == {}


def said_of(caplog: pytest.LogCaptureFixture, loop: Callable[[torch.nn.Module, torch.optim.Optimizer], object]) -> int:
    """How often something is said in a loop that yields where it saves."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unsaved = Unsaved({"model": model, "optimizer": optimizer}, [], [], ModuleSettings({}))
    caplog.clear()
    for step, _ in enumerate(loop(model, optimizer)):  # type: ignore[arg-type, var-annotated]
        unsaved.note_step(step, begins_epoch=False)
        unsaved.tell(step)
    return len(caplog.records)


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(1, 3)).square().sum() * scale).backward()


def usual(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        yield


def zeroed_afterwards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield


def steps_without_a_backward_pass(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(6):
        if step % 3 == 0:
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        yield


def bad_step_is_skipped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(3):
        optimizer.zero_grad()
        backward(model, scale=float("nan") if step == 1 else 1.0)
        if step != 1:
            optimizer.step()
        yield


def gradients_are_dropped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(3):
        backward(model)
        optimizer.zero_grad()
        yield


def accumulates(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(6):
        backward(model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        yield


def accumulates_rightly(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(3):
        backward(model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        yield


def accumulates_and_zeroes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(6):
        if step % 3 == 0:
            optimizer.zero_grad(set_to_none=False)
        backward(model)
        if step % 3 == 2:
            optimizer.step()
        yield


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        *[(one, 0) for one in (usual, zeroed_afterwards, steps_without_a_backward_pass)],
        *[(one, 0) for one in (bad_step_is_skipped, gradients_are_dropped)],
        *[(one, 1) for one in (accumulates, accumulates_and_zeroes)],
    ],
)
def test_gradients_that_no_optimizer_has_used(caplog: pytest.LogCaptureFixture, loop: Any, count: int) -> None:
    assert said_of(caplog, loop) == count


def never_zeroed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(3):
        backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def zeroed_now_and_then(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(4):
        if step % 2 == 0:
            optimizer.zero_grad()
        backward(model)
        optimizer.step()
        yield


def of_two_passes_never_zeroed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for _ in range(2):
        backward(model)
        backward(model)
        optimizer.step()
        yield


def zeroed_after_another_models_pass(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for step in range(4):
        optimizer.zero_grad(set_to_none=step > 1)
        backward(model)
        optimizer.step()
        backward(model)  # such as of a generator, through its discriminator
        yield


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        *[(one, 1) for one in (never_zeroed, zeroed_now_and_then, of_two_passes_never_zeroed)],
        *[(one, 0) for one in (usual, zeroed_afterwards, accumulates_rightly)],
    ],
)
def test_gradients_of_the_step_before(caplog: pytest.LogCaptureFixture, loop: Any, count: int) -> None:
    assert said_of(caplog, loop) == count
    assert caplog.text.count("used the gradients of the step before, too") == count


def test_gradients_that_another_models_pass_has_left(caplog: pytest.LogCaptureFixture) -> None:
    said_of(caplog, zeroed_after_another_models_pass)
    assert "step before" not in caplog.text


class KilledError(Exception):
    """Ends a training in the midst of an epoch."""


def three_of_eight_batches(world: World, path: Path, *, counts_itself: bool, killed_at: int | None) -> int:
    """Train three batches of each of three epochs, from the last checkpoint on. Return the steps made in all."""
    shard = world.shard(TensorDataset(torch.ones(8, 8), torch.zeros(8).long()), batch_size=1, shuffle_seed=1)
    model = world.wrap(mlp())
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=path, every="1steps", model=model)
    for _ in checkpoint.epochs(3):
        for number, _ in enumerate(shard):
            if (number if counts_itself else shard.step) == 3:
                break
            checkpoint.step()
            checkpoint._saver.wait()
            if checkpoint.steps == killed_at:
                raise KilledError
    return checkpoint.steps


@pytest.mark.parametrize(
    ("counts_itself", "killed_at", "steps", "said"),
    [
        (True, 5, 11, "its loop was left at batch 6, that of the epoch before was left at batch 4. Does the"),
        (True, 2, 11, "its loop was left at batch 6. Does the script count batches itself?"),
        (False, 5, 9, ""),
        (True, None, 9, ""),
    ],
)
def test_batches_that_the_script_counts_itself(
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    counts_itself: bool,
    killed_at: int,
    steps: int,
    said: str,
) -> None:
    with contextlib.suppress(KilledError):
        three_of_eight_batches(world, tmp_path, counts_itself=counts_itself, killed_at=killed_at)
    assert "batches itself" not in caplog.text
    assert three_of_eight_batches(world, tmp_path, counts_itself=counts_itself, killed_at=None) == steps
    assert (said in caplog.text) if said else "batches itself" not in caplog.text


@pytest.mark.full
def test_the_state_of_a_hook_may_be_a_meter(world: World, caplog: pytest.LogCaptureFixture) -> None:
    state, model = Memory(), world.wrap(torch.nn.Linear(3, 2))
    model.register_comm_hook(state, lambda memory, bucket: default_hooks.allreduce_hook(None, bucket))  # type: ignore
    Unsaved({"model": model}, [state], [], ModuleSettings({})).tell(1)
    assert not caplog.records
    Unsaved({"model": torch.compile(model)}, [], [], ModuleSettings({})).tell(1)
    assert "communication hook with a state, Memory" in caplog.text


@pytest.mark.parametrize(("order", "words"), [(range(24), 0), (range(23, -1, -1), 1)])
def test_a_sampler_that_gives_another_order_after_a_resume_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, order: Sequence[int], words: int
) -> None:
    """One whose weights are kept outside of the checkpoint."""

    def train(order: Sequence[int], steps: int) -> None:
        rows = TensorDataset(torch.ones(24, 2))
        shard = world.shard(rows, batch_size=4, sampler=lambda seed, epoch: order)
        run_dir, model = tmp_path / "run", nn.Linear(2, 2)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=run_dir, every="1steps", model=model)
        for _ in checkpoint.epochs(1):
            for _ in shard:
                checkpoint.step()
                checkpoint._saver.wait()
                if checkpoint.steps == steps:
                    return

    train(range(24), 3)
    train(order, 6)
    assert caplog.text.count("The sampler's order of epoch 1:\n  it is another one than before the resume") == words


def test_a_sampler_of_each_epoch_is_not_named_after_an_epochs_end(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int) -> None:
        shard = world.shard(
            TensorDataset(torch.ones(24, 2)), batch_size=4, sampler=lambda seed, epoch: torch.arange(24).roll(epoch)
        )
        parts: dict[str, Any] = {"shard": shard, "model": nn.Linear(2, 2)}
        checkpoint = cluster_ddp.Checkpointer(world, run_dir=tmp_path / "run", every="1epoch", **parts)
        for _ in checkpoint.epochs(2):
            for _ in shard:
                checkpoint.step()
                checkpoint._saver.wait()
                if checkpoint.steps == steps:
                    return

    train(8)  # the newest checkpoint is that of step 6
    train(12)
    assert not caplog.records


def test_an_average_of_weights_that_is_only_evaluated_is_not_trained_in_eval_mode(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(world, "run", mlp(), average=mlp())
    average = training.checkpoint._state.parts["average"]
    training.run(2, epoch_begins=lambda epoch: average.train(epoch == 0))
    assert "eval mode" not in caplog.text


class Levels(Dataset[torch.Tensor]):
    """With a level, as of a curriculum."""

    level = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(self.level))


def train_to(world: World, run_dir: Path, data: Any, steps: int, *, loop: Callable[[Any], Any] = iter) -> None:
    """Two epochs of six steps; the loop is left after so many, as if it were killed."""
    shard, model = world.shard(data, batch_size=4, shuffle_seed=1), nn.Linear(2, 2)
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=run_dir, every="1steps", model=model)
    for _ in checkpoint.epochs(2):
        for _ in loop(shard):
            checkpoint.step()
            checkpoint._saver.wait()
            if checkpoint.steps == steps:
                return


def in_a_bar(batches: Iterable[Any]) -> Iterator[Any]:
    yield from filter(None.__ne__, batches)


@pytest.mark.parametrize(
    ("killed_at", "loop", "is_said"),
    [
        (4, enumerate, True),
        (4, lambda shard: enumerate(in_a_bar(shard)), True),
        (4, lambda shard: in_a_bar(enumerate(shard)), True),
        (4, lambda shard: enumerate(shard, start=shard.step + 1), False),
        (4, in_a_bar, False),
        (6, enumerate, False),
    ],
)
def test_an_epoch_whose_batches_are_counted_from_0_after_a_resume_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, killed_at: int, loop: Any, is_said: bool
) -> None:
    train_to(world, tmp_path / "run", Levels(), killed_at, loop=loop)
    assert "enumerate" not in caplog.text
    train_to(world, tmp_path / "run", Levels(), 12, loop=loop)
    assert caplog.text.count("and enumerate counts its batches from 0 again") == is_said


@pytest.mark.parametrize(
    ("killed_at", "beside", "is_said"),
    [
        (4, lambda shard: zip(shard, range(6)), True),
        (4, lambda shard: zip(torch.zeros(6).tolist(), in_a_bar(shard)), True),
        (4, lambda shard: zip(shard, [0] * (5 - shard.step)), False),
        (4, lambda shard: zip(shard, itertools.count(shard.step)), False),
        (6, lambda shard: zip(shard, range(6)), False),
    ],
)
def test_what_stands_beside_a_shard_in_zip_begins_anew_after_a_resume(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, killed_at: int, beside: Any, is_said: bool
) -> None:
    train_to(world, tmp_path / "run", Levels(), killed_at, loop=beside)
    assert "zip" not in caplog.text
    train_to(world, tmp_path / "run", Levels(), 12, loop=beside)
    assert caplog.text.count("zip takes what stands beside the shard from its beginning") == is_said


@pytest.mark.parametrize("place", ["dataset.rng", "dataset.transform.rng"])
def test_a_generator_in_a_dataset_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    data = Levels()
    vars(data).update(transform=SimpleNamespace(scale=0.1), rng=None)
    holder = data if place == "dataset.rng" else data.transform
    holder.rng = np.random.default_rng(1)
    train_to(world, tmp_path / "run", data, 2)
    assert caplog.text.count(f"{place} draws random numbers, and is in no checkpoint") == 1


@pytest.mark.parametrize(("sets_again", "level"), [(False, 2), (True, 2), (True, 3)])
def test_a_level_of_a_dataset_that_is_not_set_again_after_a_resume_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, sets_again: bool, level: int
) -> None:
    """Also of the dataset in a Subset, such as random_split makes. Another level may be the next epoch's."""
    data, levels = Levels(), itertools.chain([2], itertools.repeat(level))

    def set_level(shard: Any) -> Any:
        data.level = next(levels)
        return shard

    train_to(world, tmp_path / "run", Subset(data, range(24)), 8, loop=set_level)
    assert "level" not in caplog.text
    data = Levels()
    loop = set_level if sets_again else iter
    for steps in (9, 11, 12):  # the first one ends before it is said
        train_to(world, tmp_path / "run", Subset(data, range(24)), steps, loop=loop)
    words = "Resuming in epoch 2:\n  the dataset had other attributes before the resume: dataset.dataset.level = 2."
    assert caplog.text.count(words) == (not sets_again)


@pytest.mark.parametrize("kind", ["falls", "in a dictionary", "of the step", "of the batch"])
@pytest.mark.parametrize("killed_at", [4, 9])
def test_a_number_of_a_dataset_that_each_step_changes_and_a_resume_begins_again_is_named(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, killed_at: int
) -> None:
    """After the first steps it is no longer as it was made. One that follows from the step is right."""

    def changed(shard: Any) -> Iterator[Any]:
        data.level = 1.0
        for step, batch in enumerate(shard, start=shard.step + 1):
            if kind == "falls":
                data.scale *= 0.9
            elif kind == "in a dictionary":
                data.of_all["scale"] *= 0.9
            elif kind == "of the step":
                data.scale = 1 / (2 + step)
            else:
                data.scale = len(batch)
            yield batch

    for steps in (killed_at, 12):
        data = Levels()
        vars(data).update(scale=1.0, of_all={"scale": 1.0})
        train_to(world, tmp_path / "run", data, steps, loop=changed)
    name = {"falls": "dataset.scale", "in a dictionary": "dataset.of_all['scale']"}.get(kind)
    words = "the dataset had other attributes before the resume"
    assert caplog.text.count(words) == (name is not None)
    assert name is None or f"{words}: {name} = 0." in caplog.text


@pytest.mark.parametrize("changes", ["transform", "weights"])
def test_a_transform_and_a_tensor_in_a_dataset_are_looked_at(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: str
) -> None:
    def made() -> Levels:
        data = Levels()
        vars(data).update(transform=SimpleNamespace(scale=0.1), weights=torch.ones(3), kind=Levels)
        return data

    def change(shard: Any) -> Any:
        if changes == "transform":
            data.transform.scale = 0.2
        else:
            data.weights[0] = 2
        return shard

    data = made()
    train_to(world, tmp_path / "run", data, 4, loop=change)
    train_to(world, tmp_path / "run", made(), 6)
    said = {"transform": "dataset.transform.scale = 0.2.", "weights": "dataset.weights."}
    assert caplog.text.count(f"before the resume: {said[changes]}") == 1
