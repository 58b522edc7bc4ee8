"""Each option of the reference training has its effect; the small CNN learns the digits."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import few_digits
import pytest
import signal_handlers
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.mnist import data, training
from cluster_ddp.mnist.model import RECIPES, chosen, lr_factor
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.mnist.training import Step
from cluster_ddp.runtime.data.data_loader import Loader
from cluster_ddp.runtime.profiling import node_usage

pytestmark = pytest.mark.full

JOB_ID = job_ids()
SMALL = {"dataset": "digits", "recipe": "fast", "amp": "off", "cuda": False, "epochs": 1}


def config(run_dir: Path, **options: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "log_interval": 1, "run_dir": run_dir, **options})


def records(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def train(run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    """Train in this process. Returns the "train" records."""
    with signal_handlers.put_back():
        training.run(config(run_dir, **options))
    return records(run_dir)


def digest(run_dir: Path) -> str:
    return records(run_dir, "done")[0]["weights_sha256"]


def in_rank(run_dir: Path, options: dict[str, Any], stop_at: int | None) -> None:
    """Train in a rank, which gets USR1 after so many updates, and slows down until all ranks stop."""
    if options.pop("few", False):
        few_digits.use()
    if stop_at is not None:
        step = cluster_ddp.Checkpointer.step

        def stopped(self: cluster_ddp.Checkpointer) -> None:
            if self.steps == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            if self.steps >= stop_at:
                time.sleep(1.0)
            step(self)

        cluster_ddp.Checkpointer.step = stopped  # type: ignore[method-assign]
    training.run(config(run_dir, **options))


def on_ranks(
    run_dir: Path, ranks: int, stop_at: int | None = None, status: int = 0, restarts: int = 0, **options: Any
) -> list[Outcome]:
    logs = run_dir.with_suffix(f".logs{restarts}")
    logs.mkdir()
    job_id, env = JOB_ID + ranks, {"SLURM_RESTART_COUNT": str(restarts)}
    environments = [slurm_step(rank, ranks, job_id=job_id, **env) for rank in range(ranks)]
    ends = run_ranks(functools.partial(in_rank, run_dir, options, stop_at), environments, logs)
    assert [end.exit_code for end in ends] == [status] * ranks, ends
    return ends


def curve(found: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [(one["epoch"], one["step"], one["samples"], one["lr"], one["loss"]) for one in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("alone") / "x", global_batch_size=64, epochs=2)


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 1), (2, 2)])
def test_one_two_and_four_ranks_give_the_same_loss_curve(
    tmp_path: Path, alone: list[dict[str, Any]], ranks: int, accumulate: int
) -> None:
    """The same global batch: losses differ by the order of additions only."""
    on_ranks(tmp_path / "x", ranks, global_batch_size=64, accumulate=accumulate, epochs=2)
    found = curve(records(tmp_path / "x"))
    assert len(found) == 2 * 23 and alone[-1]["loss"] < 0.5
    for here, there in zip(found, curve(alone), strict=True):
        assert here == pytest.approx(there, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(32, 2), (16, 4), (8, 8)])
def test_accumulated_batches_are_one_large_one(
    tmp_path: Path, alone: list[dict[str, Any]], batch_size: int, accumulate: int
) -> None:
    """The last update of an epoch has 29 samples: fewer batches, and one that is smaller."""
    found = curve(train(tmp_path / "x", batch_size=batch_size, accumulate=accumulate, epochs=2))
    for here, there in zip(found, curve(alone), strict=True):
        assert here == pytest.approx(there, rel=1e-3, abs=1e-4)
    assert (tmp_path / "x" / "checkpoints" / "step-00000046.pt").exists()  # updates are counted


def test_ranks_that_cannot_share_a_global_batch_get_one_that_they_can(tmp_path: Path) -> None:
    said = r"(?s)Updates of 100 samples.*ranks \* --accumulate, 1 \* 3.*--global-batch-size 99"
    with pytest.raises(SpecError, match=said):
        train(tmp_path / "x", global_batch_size=100, accumulate=3)


def test_the_learning_rate_follows_the_global_batch() -> None:
    world: Any = SimpleNamespace(world_size=4)
    for rule, factor in (("none", 1.0), ("linear", 6.0), ("sqrt", 6**0.5)):
        options = TrainConfig(lr_scaling=rule, batch_size=32, accumulate=3)
        assert lr_factor(options, chosen(options, world), world) == pytest.approx(factor)  # 4 * 32 * 3 / 64


def test_warm_up_and_scaling_are_on_top_of_the_recipes_schedule(tmp_path: Path) -> None:
    plain = train(tmp_path / "a", batch_size=128, epochs=2)
    found = train(tmp_path / "b", batch_size=128, epochs=2, lr=0.001, warmup_epochs=0.5, lr_scaling="linear")
    scale = 0.001 / RECIPES["fast"].lr * 128 / RECIPES["fast"].batch_size
    for one, other in zip(plain, found, strict=True):
        done = one["epoch"] - 1 + (one["step"] * 128) / 1437
        warm = min(1.0, 0.01 + 0.99 * done / 0.5)
        assert other["lr"] == pytest.approx(one["lr"] * scale * warm)


def test_a_stopped_training_with_all_of_them_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": "convnet", "accumulate": 3, "amp": "fp16", "batch_size": 8, "warmup_epochs": 0.5}
    few = {"few": True}  # CPUs take long for fp16
    on_ranks(tmp_path / "whole", 2, **few, **options)
    on_ranks(tmp_path / "part", 2, stop_at=3, status=75, **few, **options)
    (resumed, _) = on_ranks(tmp_path / "part", 2, restarts=1, **few, **options)
    assert "of its 360 samples seen" in resumed.output  # in the middle of the epoch
    assert digest(tmp_path / "part") == digest(tmp_path / "whole")
    assert len(curve(records(tmp_path / "part"))) == 8
    assert curve(records(tmp_path / "part")) == curve(records(tmp_path / "whole"))

    # The statistics of rank 0 are those that were tested, saved, and are tested again.
    monkeypatch.setattr(node_usage, "PATIENCE_S", 60.0)  # its only record is the one of the end
    monkeypatch.setattr(data, "_digits", few_digits.few)
    training.run(config(tmp_path / "test", model="convnet", amp="fp16", eval_only=True, resume=str(tmp_path / "part")))
    (tested,), (before,) = records(tmp_path / "test", "test"), records(tmp_path / "part", "test")
    assert tested["weights"] == str(tmp_path / "part" / "checkpoints" / "step-00000008.pt")
    assert tested["correct"] == pytest.approx(before["correct"], abs=2)  # another batch size: other roundings
    assert tested["loss"] == pytest.approx(before["loss"], rel=0.01)
    assert sorted(path.name for path in (tmp_path / "test").iterdir()) == [
        ".lock",
        "metrics.jsonl",
        "run.json",
        "usage-0.jsonl",
    ]

    with pytest.raises(cluster_ddp.CheckpointError, match=r"its model is 'convnet'.*its accumulate is 3"):
        train(tmp_path / "part", amp="fp16")


def test_fewer_ranks_end_an_epoch_with_an_update(tmp_path: Path) -> None:
    """Two ranks begin with updates of 180 samples; one rank ends with updates of 90, and the rest."""
    options = {"accumulate": 3, "batch_size": 30}
    on_ranks(tmp_path / "x", 2, stop_at=2, status=75, **options)
    seen = records(tmp_path / "x")[-1]["samples"]
    assert 360 <= seen < 1260
    found = train(tmp_path / "x", **options)
    assert [one["samples"] for one in found] == [*range(180, seen + 1, 180), *range(seen + 90, 1437, 90), 1437]
    assert [one["step"] for one in found] == list(range(len(found)))


def test_fp16_skips_updates_that_overflow() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        options = TrainConfig(**{**SMALL, "amp": "fp16"})
        step = Step(options, chosen(options, world), world)
        shard = world.shard(cluster_ddp.ResidentSet(torch.randn(40, 1, 28, 28), torch.arange(40) % 10), batch_size=20)
        weights = [parameter.clone() for parameter in step.model.parameters()]
        for images, labels in shard:
            loss = step.backward(images, labels, shard)
            assert loss.dtype == torch.float32
            if shard.step == 0:
                next(step.model.parameters()).grad.fill_(float("inf"))
            step.update(0)
            is_same = [torch.equal(*pair) for pair in zip(weights, step.model.parameters())]
            assert all(is_same) if shard.step == 0 else not any(is_same)
        assert step.scaler.get_scale() == 2**15


def test_the_scaler_is_a_part_of_the_checkpoint_of_fp16_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_digits", few_digits.few)  # CPUs are slow with fp16
    for amp, parts in (("fp16", {"scaler"}), ("off", set())):
        train(tmp_path / amp, amp=amp, batch_size=500)
        (path,) = (tmp_path / amp / "checkpoints").glob("*.pt")
        content = torch.load(path, weights_only=True)
        assert content["parts"].keys() - {"model", "optimizer"} == parts
        assert content["identity"].keys() == {"dataset", "recipe", "lr", "gamma", "amp"}


def test_fp16_stops_at_a_loss_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "normalise", lambda x, y, **_: (x[:, None] * float("nan"), y))
    with pytest.raises(cluster_ddp.NonFiniteError, match="loss nan"):
        train(tmp_path / "x", amp="fp16")


def test_batch_normalisation_of_all_ranks_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "x", model="convnet", sync_batchnorm=True, dry_run=True)
    assert "SyncBatchNorm needs GPUs" in capsys.readouterr().out


def test_an_evaluation_leaves_a_trainings_run_directory_alone(tmp_path: Path) -> None:
    train(tmp_path / "x", batch_size=500)
    before = (tmp_path / "x" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirError, match="it is a training's"):
        training.run(config(tmp_path / "x", eval_only=True, resume=str(tmp_path / "x")))
    assert (tmp_path / "x" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(cluster_ddp.CheckpointError):
        training.run(config(tmp_path / "y", eval_only=True, resume=str(tmp_path / "nothing")))


def test_workers_make_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = Loader.__init__

    def noted(self: Loader, *arguments: Any, **options: Any) -> None:
        made.append(options["num_workers"])
        init(self, *arguments, **options)

    monkeypatch.setattr(Loader, "__init__", noted)
    train(tmp_path / "resident")
    assert made == []
    train(tmp_path / "loader", workers=1)
    assert made == [1]
    assert digest(tmp_path / "resident") == digest(tmp_path / "loader")


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of 1 or more"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"workers": -1}, "workers must be a whole number of 0 or more"),
        ({"warmup_epochs": -0.5}, "warmup_epochs must be"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs must be"),
        ({"dataset": "fasion"}, "there is no such dataset. Did you mean fashion"),
        ({"dataset": "folder:"}, "--dataset mnist, fashion, digits or folder:PATH"),
        ({"batch_size": 8, "global_batch_size": 8}, "--batch-size and --global-batch-size"),
        ({"cuda_graph": True, "accumulate": 2}, "--cuda-graph --accumulate 2"),
        ({"cuda_graph": True, "amp": "fp16"}, "--cuda-graph --amp fp16"),
        ({"sync_batchnorm": True}, "add --model convnet"),
        ({"eval_only": True}, "name a checkpoint or a run directory: --resume PATH"),
        ({"eval_only": True, "resume": "x", "save_model": True}, "--eval-only --save-model"),
    ],
)
def test_contradictions_are_refused_before_ranks_meet(options: dict[str, Any], mentioned: str) -> None:
    with pytest.raises(SpecError) as caught:
        TrainConfig(**options)
    assert mentioned in str(caught.value)
