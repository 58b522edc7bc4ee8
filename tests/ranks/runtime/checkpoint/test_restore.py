"""Stopped or killed at any step, a training continues as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import few_digits
import pytest
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.mnist import training
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.full

JOB_ID = job_ids()
VOLATILE = ("time", "samples_per_s", "waiting_for_data")


def train_digits() -> None:
    """Two epochs of 20 steps in three ranks; each rank sends itself a signal at a step that the environment names."""
    fault = json.loads(os.environ.get("FAULT", "{}"))
    step, ours = Checkpointer.step, str(os.environ["SLURM_PROCID"])

    def step_with_fault(self: Checkpointer) -> None:
        if fault.get("step") == self.steps + 1 and ours in fault["ranks"]:
            if fault.get("saved"):
                self._folder.writer.wait()
            os.kill(os.getpid(), fault["signal"])
        step(self)

    Checkpointer.step = step_with_fault  # type: ignore[method-assign]
    few_digits.use()
    options = {"model": "convnet", "epochs": 2, "test_batch_size": 13, **json.loads(os.environ["OPTIONS"])}
    training.run(TrainConfig(dataset="digits", **options))


def run(folder: Path, world_size: int = 3, **env: object) -> list[Outcome]:
    (folder / "logs").mkdir(exist_ok=True)
    options = {"batch_size": 6, "checkpoint_every": "7steps", "log_interval": 4, **env.pop("options", {})}  # type: ignore[dict-item]
    texts: Mapping[str, str] = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in env.items()
    }
    common = {"OPTIONS": json.dumps(options), "CLUSTER_DDP_RUN_DIR": str(folder / "run"), **texts}
    environments = [slurm_step(rank, world_size, job_id=JOB_ID, **common) for rank in range(world_size)]
    return run_ranks(train_digits, environments, folder / "logs")


def metrics(folder: Path) -> list[dict]:
    """Without times, and without the records of times, whose number differs."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["kind"] != "steps"]
    return [{key: value for key, value in record.items() if key not in VOLATILE} for record in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    for end in run(folder):
        assert end.exit_code == 0, end.output
    found = metrics(folder)
    assert found[-1]["kind"] == "done"
    return found


def resumed(folder: Path) -> list[dict]:
    ends = run(folder, SLURM_RESTART_COUNT="1")
    for end in ends:
        assert end.exit_code == 0, end.output
    assert "Resuming from" in ends[0].output
    return metrics(folder)


def test_killed_in_mid_epoch(tmp_path: Path, uninterrupted: list[dict]) -> None:
    """The metrics after the last checkpoint are recorded anew, not twice; the weights are the same bits."""
    fault = {"step": 17, "ranks": "012", "signal": signal.SIGKILL, "saved": True}
    assert {end.exit_code for end in run(tmp_path, FAULT=fault)} == {-signal.SIGKILL}
    assert resumed(tmp_path) == uninterrupted


def test_one_rank_is_told_to_stop(tmp_path: Path, uninterrupted: list[dict]) -> None:
    ends = run(tmp_path, FAULT={"step": 11, "ranks": "1", "signal": signal.SIGTERM})
    assert {end.exit_code for end in ends} == {75}, ends
    assert "rank 1: " in ends[0].output and " got TERM" in ends[0].output
    assert resumed(tmp_path) == uninterrupted


def train_with_batch_norm() -> None:
    """Three epochs; in the first one's evaluation, the environment may want the training to be stopped."""
    with cluster_ddp.distributed(cuda=False) as world:
        torch.manual_seed(0)
        dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        shard, test = world.shard(dataset, batch_size=4, shuffle_seed=1), world.shard(dataset, batch_size=4)
        model = world.wrap(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
        for epoch in checkpoint.epochs(3):
            model.train()
            for x, y in shard:
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                checkpoint.step()
            if os.environ.get("STOP") and epoch == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
                while True:
                    checkpoint.stop_if_asked()
            model.eval()
            with torch.no_grad():
                losses = [float((model.module(x) - y).square().sum()) for x, y in test]
            checkpoint.run_dir.log("test", {"losses": world.gather(losses)})


def test_stopped_in_an_evaluation_each_rank_keeps_its_batch_norm(tmp_path: Path) -> None:
    """Between two steps, each rank has statistics of its own."""
    for name, env in (("whole", {}), ("stopped", {"STOP": "1"}), ("stopped", {"SLURM_RESTART_COUNT": "1"})):
        (tmp_path / name).mkdir(exist_ok=True)
        common = {"CLUSTER_DDP_RUN_DIR": str(tmp_path / name / "run"), **env}
        environments = [slurm_step(rank, 2, job_id=JOB_ID + 1, **common) for rank in range(2)]
        ends = run_ranks(train_with_batch_norm, environments, tmp_path / name)
        assert {end.exit_code for end in ends} == {75 if "STOP" in env else 0}, ends
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")


def train_with_workers() -> None:
    """Two epochs whose data two workers load; the signal goes to them, too: Slurm or torchrun's agent may do that."""
    with cluster_ddp.distributed(cuda=False) as world:
        dataset = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1))
        options = {"num_workers": 2, "multiprocessing_context": os.environ["CONTEXT"]}
        shard = world.shard(dataset, batch_size=2, shuffle_seed=1, **options)
        model = world.wrap(torch.nn.Linear(1, 1))
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model)
        for _ in checkpoint.epochs(2):
            for (x,) in shard:
                checkpoint.run_dir.log("train", {"x": x.flatten().tolist()})
                if os.environ.get("SIGNAL") and checkpoint.steps == 4:
                    for child in torch.multiprocessing.active_children():
                        os.kill(child.pid or 0, int(os.environ["SIGNAL"]))
                    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
                checkpoint.step()


@pytest.mark.parametrize(("context", "number"), [("fork", signal.SIGTERM), ("spawn", signal.SIGUSR1)])
def test_signals_do_not_end_the_loaders_workers(tmp_path: Path, context: str, number: int) -> None:
    for status, env in ((75, {"SIGNAL": str(int(number))}), (0, {"SLURM_RESTART_COUNT": "1"})):
        common = {"CLUSTER_DDP_RUN_DIR": str(tmp_path / "run"), "CONTEXT": context, **env}
        (end,) = run_ranks(train_with_workers, [slurm_step(0, 1, job_id=JOB_ID + 2, **common)], tmp_path)
        assert end.exit_code == status, end.output
    seen = [x for record in metrics(tmp_path) for x in record["x"]]
    assert sorted(seen) == sorted(2 * [float(i) for i in range(40)])
