"""Where the time of the steps goes, on a clock that the tests turn."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.runtime.profiling import step_times
from cluster_ddp.runtime.profiling.step_times import ExposedCommunication, StepTimes
from cluster_ddp.runtime.world import World


class Clock:
    """time.monotonic(), turned by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(step_times, "time", SimpleNamespace(monotonic=lambda: self.now))


class Slow(torch.optim.SGD):
    """An optimizer whose step takes half a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.clock = clock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.now += 0.5


def shard() -> Any:
    return SimpleNamespace(began_s=0.0, waited_s=0.0, seen_in_pass=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def a_pass(clock: Clock, data: Any, times: StepTimes, optimizer: Slow, steps: int) -> None:
    """Each step waits 1 s for data, computes for 2.5 s, updates in 0.5 s, and saves in 1 s."""
    data.began_s, data.waited_s, data.seen_in_pass = clock.now, 0.0, 0
    for _ in range(steps):
        clock.now += 1
        data.waited_s, data.seen_in_pass = data.waited_s + 1, data.seen_in_pass + 20
        clock.now += 2.5
        optimizer.step()
        times.begin()
        clock.now += 1
        times.end()


def measured(times: StepTimes, told: list[float | None]) -> None:
    """Lets a model's all-reduces take the last of `told`."""
    stand_in = SimpleNamespace(of_a_step=lambda steps: told[-1], reset=lambda: None)
    times._communication = [stand_in]  # type: ignore[list-item]


def test_the_parts_of_a_step_make_it_up_and_an_evaluation_counts_to_none(clock: Clock) -> None:
    data, optimizer = shard(), Slow(clock)
    times = StepTimes([data], [optimizer], world_size=2)
    measured(times, [1.5])
    clock.now += 50  # getting ready
    a_pass(clock, data, times, optimizer, 2)
    clock.now += 70  # an evaluation
    a_pass(clock, data, times, optimizer, 1)
    assert times.is_due() and times.own_s == 2.5
    assert times.record([4.0, 3.0]) == {
        "steps": 3,
        "step_s": 5.0,
        "data_s": 1.0,
        "optimizer_s": 0.5,
        "checkpoint_s": 1.0,
        "communication_s": 1.5,
        "compute_s": 1.0,
        "rank_s_min": 3.0,
        "rank_s_max": 4.0,
        "slowest_rank": 0,
        "samples_per_s": 4.0,
        "samples_per_s_per_rank": 2.0,
    }
    assert not times.is_due() and times.record([4.0, 3.0]) == {}
    assert times.own_s == 2.5  # what was known before, until there is a newer step


def test_what_is_not_known_is_left_out(clock: Clock) -> None:
    times = StepTimes([], [], world_size=2)
    clock.now += 5
    times.begin()
    times.end()
    assert times.record([5.0, 0.0]) == {"steps": 1, "step_s": 5.0, "checkpoint_s": 0.0, "compute_s": 5.0}


def test_two_shards_that_are_passed_one_after_the_other(clock: Clock) -> None:
    first, second, optimizer = shard(), shard(), Slow(clock)
    times = StepTimes([first, second], [optimizer], world_size=1)
    a_pass(clock, first, times, optimizer, 2)
    a_pass(clock, second, times, optimizer, 2)
    found = times.record([])
    assert (found["steps"], found["data_s"], found["samples_per_s"]) == (4, 1.0, 4.0)


def test_communication_that_was_not_measured_is_left_out_and_no_rank_is_compared(clock: Clock) -> None:
    """Each rank waits for the slowest: without the time of that, all take equally long. 0 would say that it is free."""
    times, optimizer, told = StepTimes([], [], world_size=2), Slow(clock), [2.0, None]
    measured(times, told)
    a_pass(clock, shard(), times, optimizer, 3)
    assert times.own_s == 0.0 and "communication_s" not in times.record([times.own_s, times.own_s])
    told.append(2.0)
    a_pass(clock, shard(), times, optimizer, 3)
    assert times.own_s == 2.0 and times.record([])["communication_s"] == 2.0
    told.append(None)
    a_pass(clock, shard(), times, optimizer, 3)
    assert times.own_s == 2.0  # until the record
    times.record([])
    assert times.own_s == 0.0


class LateReduction:
    """DDP's communication hook, whose all-reduces end some time after the backward pass, without a second rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.order = seconds, list[str]()

    def __call__(self, bucket: Any) -> Any:
        future: Any = torch.futures.Future()

        def end() -> None:
            self.order.append("reduced")
            future.set_result(bucket.buffer())

        threading.Timer(self.seconds, end).start()
        return future


def trained(world: World, reduction: LateReduction) -> tuple[Any, ExposedCommunication]:
    model = world.wrap(torch.nn.Linear(3, 2))
    model.register_comm_hook(None, lambda _, bucket: reduction(bucket))  # torch refuses annotations that are text
    return model, ExposedCommunication(model)


def backward(model: Any) -> None:
    model(torch.rand(4, 3)).sum().backward()


def test_the_wait_after_the_backward_pass_is_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_EVERY_S", 0.0)
    model, times = trained(world, LateReduction(0.3))
    for _ in range(2):
        backward(model)
    assert (times.of_a_step(2) or 0) > 0.25
    assert (times.of_a_step(1) or 0) > 0.5  # two all-reduces a step
    assert times.of_a_step(3) is None  # a step whose backward pass was not seen: a replay of a CUDA graph
    with model.no_sync():
        backward(model)
    assert (times.of_a_step(3) or 0) > 0.17  # nothing is added up there: two in three steps
    times.reset()
    assert times.of_a_step(1) is None
    times.close()
    backward(model)
    assert times.of_a_step(1) is None


def test_a_frozen_model_is_not_measured(world: World) -> None:
    model = world.wrap(torch.nn.Linear(3, 2))
    model.requires_grad_(False)
    times = StepTimes([], [model], world_size=2)
    times.begin()
    assert times.own_s == 0.0
    times.close()


def test_parameters_that_ddp_leaves_to_others_are_not_waited_for(world: World) -> None:
    """Their gradients may be the last ones: DDP has already been told to wait then."""
    reduction, bare = LateReduction(0.3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    bare._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]  # type: ignore[assignment]
    model = world.wrap(bare)
    model.register_comm_hook(None, lambda _, bucket: reduction(bucket))
    times = ExposedCommunication(model)
    backward(model)
    assert (times.of_a_step(1) or 0) > 0.25


def test_a_model_that_was_left_frees_its_memory(world: World) -> None:
    """Also if its training was not ended, and so nothing was closed."""
    model, _ = trained(world, LateReduction(0.0))
    backward(model)
    left = weakref.ref(model)
    del model, _
    gc.collect()
    assert left() is None


def test_of_fast_steps_some_are_measured(world: World) -> None:
    model, times = trained(world, LateReduction(0.0))
    for _ in range(20):
        backward(model)
    assert times.of_a_step(20) is not None and 1 <= times._samples < 20


def test_on_a_gpu_events_are_read_once_they_are_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA's: nothing waits, and a captured pass is not measured."""
    is_over, is_capturing = [False], [False]
    reduction = LateReduction(0.1)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            reduction.order.append(f"event on {stream}")

        def query(self) -> bool:
            return is_over[0]

        def elapsed_time(self, other: object) -> float:
            return 40.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    model, times = trained(world, reduction)
    times._device = torch.device("cuda", 0)
    backward(model)
    assert reduction.order == ["event on cuda:0's stream", "reduced", "event on cuda:0's stream"]
    assert times.of_a_step(1) is None
    is_over[0] = True
    assert times.of_a_step(1) == 0.04
    is_capturing[0] = True
    backward(model)
    assert times.of_a_step(2) is None


def test_a_closed_one_leaves_no_hook(clock: Clock) -> None:
    optimizer = Slow(clock)
    times = StepTimes([], [optimizer], world_size=1)
    times.close()
    optimizer.step()
    assert times._optimizer_s == 0.0


def train_with_a_slow_rank() -> None:
    step_times._LEAST_S = 0.0
    with cluster_ddp.distributed(cuda=False) as world:
        model = world.wrap(torch.nn.Linear(300, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard = world.shard(torch.utils.data.TensorDataset(torch.rand(80, 300)), batch_size=2)
        parts = {"model": model, "optimizer": optimizer}
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, every="never", **parts)
        for _ in checkpoint.epochs(1):
            for (samples,) in shard:
                time.sleep(0.08 * (world.rank == 1))
                optimizer.zero_grad()
                model(samples).sum().backward()
                optimizer.step()
                checkpoint.step()


@pytest.mark.quick
def test_the_slow_rank_is_named_and_the_other_ones_wait_is_communication(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    env = {"CLUSTER_DDP_RUN_DIR": str(tmp_path / "run")}
    ends = run_ranks(
        train_with_a_slow_rank, [slurm_step(rank, 2, job_id=os.getpid(), **env) for rank in range(2)], tmp_path / "logs"
    )
    assert [end.exit_code for end in ends] == [0, 0], ends
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (record["kind"], record["global_step"], record["steps"], record["progress"]) == ("steps", 20, 20, 1.0)
    assert (record["restart"], record["slowest_rank"]) == (0, 1)
    assert record["rank_s_max"] - record["rank_s_min"] > 0.04
    assert record["communication_s"] > 0.04 and record["step_s"] > 0.08
    parts = [record[f"{name}_s"] for name in ("data", "compute", "communication", "optimizer", "checkpoint")]
    assert sum(parts) == pytest.approx(record["step_s"], abs=1e-6)
