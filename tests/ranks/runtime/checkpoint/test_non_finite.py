"""A state with NaN or Inf is never saved over a finite one."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.errors import CheckpointError, NonFiniteError, SpecError
from cluster_ddp.jobs import run_state
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.non_finite import FiniteState
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

JOB_ID = job_ids()
NAN, INF = math.nan, math.inf
Spoil = Callable[["Masked", torch.optim.Optimizer], None]


class Masked(torch.nn.Module):
    """With a causal mask as a buffer, and another one as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.register_buffer("mask", torch.full((2, 2), -INF).triu(1))
        self.bias = torch.nn.Parameter(torch.tensor([0.0, -INF]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.softmax(x + self.bias, dim=-1))


def train(world: World, path: Path, spoil: dict[int, Spoil] | None = None, *, epochs: int = 4, **options: Any) -> None:
    """The README's loop: two steps an epoch. At some steps, something is done to the model or the optimizer."""
    torch.manual_seed(1)
    shard = world.shard(TensorDataset(torch.rand(8, 2), torch.rand(8, 1)), batch_size=4, shuffle_seed=1)
    model = world.wrap(Masked())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpoint = Checkpointer(world, shard=shard, run_dir=path, model=model, optimizer=optimizer, **options)
    for _ in checkpoint.epochs(epochs):
        for x, y in shard:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            (spoil or {}).get(checkpoint.steps + 1, lambda *_: None)(model.module, optimizer)
            checkpoint.step()
            checkpoint._saver.wait()  # else a slow disk leaves checkpoints out


def weight_is(value: float) -> Spoil:
    def spoil(model: Masked, optimizer: torch.optim.Optimizer) -> None:
        model.linear.weight.data[0, 1] = value

    return spoil


def momentum_is(value: float) -> Spoil:
    def spoil(model: Masked, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[model.linear.bias]["exp_avg"].fill_(value)

    return spoil


def names(path: Path) -> list[str]:
    return sorted(found.name for found in (path / "checkpoints").iterdir())


def saved(path: Path) -> list[int]:
    return [int(name[5:-3]) for name in names(path) if name.startswith("step-")]


@pytest.mark.fault(
    "weights or optimizer state become NaN or Inf, in a script without FiniteCheck",
    "never saved: the last finite checkpoint stays. The log has an error, `status` and `report` a note; training "
    "continues (`on_nan='stop'`: FAILED)",
    bound="the next save",
    also=("test_a_job_may_end_at_it",),
)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (weight_is(NAN), "NaN or Inf in model linear.weight"),
        (weight_is(-INF), "NaN or Inf in model linear.weight"),
        (momentum_is(INF), "optimizer state of parameter "),
    ],
)
def test_the_last_finite_checkpoint_stays(
    world: World, tmp_path: Path, said: pytest.LogCaptureFixture, spoil: Spoil, words: str
) -> None:
    """As the README's loop stands, with the fewest checkpoints kept, through epochs of NaN to the training's end."""
    train(world, tmp_path, dict.fromkeys(range(3, 9), spoil), keep=1)
    assert saved(tmp_path) == [2]
    record, last = [one for one in said.records if one.levelno == logging.ERROR]
    assert said.records[-1] is last
    assert last.getMessage() == (
        "The training ends with NaN or Inf at step 8, which is not saved; "
        f"the last finite one is of step 2: {tmp_path}/checkpoints/step-00000002.pt"
    )
    assert "Training, step 4:" in record.getMessage() and words in record.getMessage()
    assert "step-00000002.pt" in record.getMessage() and 'on_nan="stop"' in record.getMessage()
    assert run_state.non_finite_step(tmp_path) == 4
    train(world, tmp_path, keep=1)  # it resumes from there
    assert saved(tmp_path) == [8] and run_state.non_finite_step(tmp_path) is None
    model = checkpoint_file.read(tmp_path / "checkpoints" / "step-00000008.pt")["parts"]["model"]
    assert model["linear.weight"].isfinite().all()


def test_masks_are_saved(world: World, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """-Inf in a buffer, and in a parameter that began so, with what Adam makes of it; also after a resume."""

    def spoil(model: Masked, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[model.bias]["exp_avg_sq"][1] = INF
        model.mask[1, 0] = NAN

    for epochs in (2, 4):
        train(world, tmp_path, {3: spoil, 7: spoil}, epochs=epochs, keep=9)
    assert saved(tmp_path) == [2, 4, 6, 8] and "NaN" not in said.text


def test_a_state_that_is_finite_again_is_saved(world: World, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    def seen(value: float) -> Spoil:
        return lambda model, optimizer: optimizer.state[model.linear.bias].update(seen=torch.tensor(value))

    train(world, tmp_path, {3: seen(INF), 5: seen(1.0), 8: seen(NAN)}, keep=9)
    assert saved(tmp_path) == [2, 6] and said.text.count("This state is not saved") == 1


def test_a_job_may_end_at_it(world: World, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as error:
        train(world, tmp_path, {4: weight_is(NAN)}, on_nan="stop")
    last = tmp_path / "checkpoints" / "step-00000002.pt"
    assert error.value.asked == "Training, step 4:"
    assert error.value.found == (
        f"NaN or Inf in model linear.weight. This state is not saved; last good checkpoint: {last}."
    )
    assert saved(tmp_path) == [2]


def test_it_may_be_saved(world: World, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    train(world, tmp_path, {4: weight_is(NAN)}, epochs=2, on_nan="save")
    assert saved(tmp_path) == [2, 4] and not said.records


def test_another_choice_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"on_nan='stopp'.*\n.*Did you mean stop\?"):
        train(world, tmp_path, on_nan="stopp")


def test_the_best_one_is_not_replaced(world: World, tmp_path: Path) -> None:
    model = world.wrap(Masked())
    checkpoint = Checkpointer(world, run_dir=tmp_path, every="never", model=model)
    for done in checkpoint.until(3):
        model.module.linear.weight.data.fill_(NAN if done == 1 else done)
        checkpoint.step()
        assert checkpoint.best("accuracy", done / 10)
        checkpoint._saver.wait()
        best = checkpoint_file.read(tmp_path / "checkpoints" / "best-accuracy.pt")
        assert best["best"] == {"accuracy": {0: 0.0, 1: 0.0, 2: 0.2}[done]}


def test_a_stop_resumes_from_the_last_finite_one(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And if there is nothing new that is finite, it is an error: a requeued job would end there again."""

    def nan_and_signal(model: Masked, optimizer: torch.optim.Optimizer) -> None:
        weight_is(NAN)(model, optimizer)
        os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Stopped):
        train(world, tmp_path, {3: nan_and_signal})
    assert f"NOT saved. The last good checkpoint: {tmp_path}/checkpoints/step-00000002.pt." in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="nothing could be saved since step 2: a restart would end here again"):
        train(world, tmp_path, {3: nan_and_signal})
    assert saved(tmp_path) == [2]


def test_training_does_not_wait_for_the_look(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made where the file is written: beside the training, of the copy in the host's memory."""
    threads, look = [], FiniteState.non_finite

    def noted(self: FiniteState, states: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return look(self, states)

    monkeypatch.setattr(FiniteState, "non_finite", noted)
    train(world, tmp_path, epochs=3)
    at_the_start, *others = threads
    assert at_the_start == threading.main_thread().name
    assert len(others) == 4 and all(name.startswith("checkpoint") for name in others)


def test_tensors_of_every_kind_are_looked_at() -> None:
    class Kinds(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
                values = torch.tensor([1.0, value]).to(dtype)
                self.register_parameter(f"of_{str(dtype)[6:]}", torch.nn.Parameter(values, requires_grad=False))
            self.empty = torch.nn.Parameter(torch.empty(0))
            self.sparse = torch.nn.Parameter(torch.eye(2).to_sparse())
            self.whole = torch.nn.Parameter(torch.tensor([1]), requires_grad=False)

    looking = FiniteState({"model": Kinds(2.0)})
    assert looking.non_finite({"model": Kinds(3.0).state_dict()}) == []
    found = ["model of_float64", "model of_float16", "model of_bfloat16", "model of_complex64"]
    for value in (NAN, INF):
        assert looking.non_finite({"model": Kinds(value).state_dict()}) == found


def test_an_empty_parameter_beside_a_complex_one_is_no_error() -> None:
    """The norm that is taken of complex values, and of all on a GPU, is none of an empty tensor."""
    model = torch.nn.Module()
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, dtype=torch.complex64)))
    assert FiniteState({"model": model}).non_finite({"model": model.state_dict()}) == []


def train_two_ranks() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        train(world, Path(os.environ["RUN"]), {4: weight_is(NAN)}, on_nan="stop")


@pytest.mark.quick
def test_all_ranks_end_with_one_error(tmp_path: Path) -> None:
    steps = [slurm_step(rank, 2, job_id=JOB_ID, RUN=str(tmp_path / "run")) for rank in range(2)]
    ends = run_ranks(train_two_ranks, steps, tmp_path)
    assert all(end.exit_code not in (0, None) for end in ends), ends
    assert [end.output.count("NaN or Inf in model linear.weight. This state is not saved") for end in ends] == [1, 0]
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert "The training reached its end." not in [one.get("why") for one in starts]
