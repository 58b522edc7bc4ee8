"""A whole training, stopped and continued, in a world of one; with other numbers of ranks in worlds of processes."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gc
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled, wait_until
from torch.distributed.device_mesh import init_device_mesh

import cluster_ddp
from cluster_ddp.agent.rank_notes import Notes
from cluster_ddp.errors import CheckpointError, RunDirError, SpecError
from cluster_ddp.runtime.checkpoint import checkpoint_file, folder, saver, stop_agreement
from cluster_ddp.runtime.checkpoint.checkpointer import Checkpointer
from cluster_ddp.runtime.collectives import Meter
from cluster_ddp.runtime.model import ddp as world_models
from cluster_ddp.runtime.rng import seed_all
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.stop_signals import Stopped
from cluster_ddp.runtime.world import World

JOB_ID = job_ids()
log = logging.getLogger("cluster_ddp")


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with their number and random augmentation from all three generators."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(1).item(), random.gauss(0, 1), float(numpy.random.randn())
        return index, torch.tensor([index / self.size, 0, 0]) + torch.tensor(noise)


class Killed(BaseException):
    """Stands in for SIGKILL: nothing is done after it, but what is on disk."""


@dataclass
class Run:
    """What a training saw and became."""

    records: list[Any]
    digest: str = ""
    checkpoint: Any = None
    evaluations: int = 0


At = Callable[[Checkpointer], None]


def train(
    world: World,
    path: Path,
    *,
    seed: int,
    epochs: int = 2,
    size: int = 40,
    data_seed: int = 3,
    workers: int = 0,
    width: int = 5,
    meters: tuple[str, ...] = ("loss",),
    patient: bool = True,
    at: At = lambda _: None,
    evaluate: At = lambda _: None,
    more: dict[str, Any] | None = None,
    run: Run | None = None,
    **options: Any,
) -> Run:
    """Two epochs of ten steps. `seed`: of what a process happens to have in its generators, and as weights."""
    run = run or Run([])
    seed_all(seed)
    shard = world.shard(Noisy(size), batch_size=4, shuffle_seed=data_seed, num_workers=workers)
    layers = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
    model = world.wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sums = {name: Meter(world) for name in meters}
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **(more or {})}
    run_dir = RunDir(path, world)
    options = {"every": "3steps", "meters": sums, **options}
    checkpoint = run.checkpoint = Checkpointer(world, shard=shard, run_dir=run_dir, **options, **parts)
    for epoch in checkpoint.epochs(epochs):
        model.train()
        for indices, samples in shard:
            optimizer.zero_grad()
            loss = model(samples + torch.rand(())).square().mean() * random.random() * numpy.random.rand()
            loss.backward()
            optimizer.step()
            for meter in sums.values():
                meter.add(loss, 1)
            run.records.append((epoch, shard.step, indices.tolist(), loss.item()))
            run_dir.log("train", {"step": checkpoint.steps + 1})
            at(checkpoint)
            checkpoint.step()
            if patient:  # else a slow disk leaves checkpoints out
                checkpoint._saver.wait()
        model.eval()
        evaluate(checkpoint)
        run.evaluations += 1
        scheduler.step()
    states = [model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    states += [(meter.total, meter.count) for meter in sums.values()]
    run.digest = hashlib.sha256(repr(states).encode() + _bytes(model)).hexdigest()
    return run


def _bytes(model: torch.nn.Module) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


def at_step(step: int, do: At) -> At:
    return lambda checkpoint: do(checkpoint) if checkpoint.steps + 1 == step else None


def kill(checkpoint: Checkpointer) -> None:
    checkpoint._folder.writer.wait()
    checkpoint.run_dir._metrics.finish(60)  # a thread of a process that was killed writes no more
    raise Killed


def signalled(checkpoint: Checkpointer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def end_at(world: World, path: Path, step: int, do: At = kill, **options: Any) -> Run:
    """A training that ends at a step of the first run."""
    run = Run([])
    with pytest.raises((Killed, Stopped)):
        train(world, path, at=at_step(step, do), run=run, **{"seed": 1, **options})
    return run


def restarted(world: World, **more: Any) -> World:
    """The same world in another run of the job."""
    return dataclasses.replace(world, topology=dataclasses.replace(world.topology, **{"restart_count": 1, **more}))


def saved(path: Path) -> list[int]:
    return sorted(int(found.stem.removeprefix("step-")) for found in (path / "checkpoints").glob("step-*.pt"))


def metrics(path: Path, name: str = "metrics.jsonl") -> list[int]:
    """The steps that the script has logged. (A slow run has records of its steps' times, too.)"""
    records = [json.loads(line) for line in (path / name).read_text().splitlines()]
    return [record["step"] for record in records if record.get("kind") != "steps"]


# Exactness


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """A training that nobody has stopped, by its number of workers."""
    folders = {workers: tmp_path_factory.mktemp("whole") for workers in (0, 2)}
    return {workers: train(world, path, seed=1, workers=workers) for workers, path in folders.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("step", "do"),
    [
        *[(5, kill), (14, signalled)],
        *(pytest.param(*one, marks=pytest.mark.full) for one in [(10, signalled), (11, kill), (20, signalled)]),
    ],
)
def test_it_goes_on_bit_for_bit(
    world: World, tmp_path: Path, whole: dict[int, Run], workers: int, step: int, do: At
) -> None:
    """Augmentation in the dataset and in its workers, dropout, and random numbers of the loop included."""
    first = end_at(world, tmp_path, step, do, workers=workers)
    second = train(restarted(world), tmp_path, seed=99, workers=workers)
    done = step if do is signalled else saved_before(step)
    assert first.records[:done] + second.records == whole[workers].records
    assert second.digest == whole[workers].digest
    assert metrics(tmp_path) == list(range(1, 21))


def saved_before(step: int) -> int:
    return (step - 1) // 3 * 3


@pytest.mark.quick
def test_killed_again_and_again(world: World, tmp_path: Path, whole: dict[int, Run]) -> None:
    for step in (4, 5, 8, 11, 13, 20):
        end_at(world, tmp_path, step, seed=1 if step == 4 else step)
    assert train(world, tmp_path, seed=99).digest == whole[0].digest
    assert metrics(tmp_path) == list(range(1, 21))


def test_the_agent_says_how_to_resume_a_job_that_nothing_starts_again(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most stops are those of a job that is requeued: then there is nothing to do."""
    monkeypatch.setenv("CLUSTER_DDP_RESUME", "cluster-ddp submit --resume 12")
    with pytest.raises(Stopped):
        train(world, tmp_path, seed=1, evaluate=lambda checkpoint: signalled(checkpoint))
    out = capsys.readouterr().out
    assert "got USR1. Saved.\n" in out and "to resume" not in out.lower()


def test_a_stop_in_an_evaluation_does_that_epoch_no_second_time(
    world: World,
    tmp_path: Path,
    whole: dict[int, Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (noted := tmp_path / "notes").mkdir()
    monkeypatch.setenv("CLUSTER_DDP_NOTES", str(noted))

    def evaluate(checkpoint: Checkpointer) -> None:
        checkpoint.stop_if_asked()
        signalled(checkpoint)
        checkpoint.stop_if_asked()

    first = Run([])
    with pytest.raises(Stopped) as stopped:
        train(world, tmp_path, seed=1, evaluate=evaluate, run=first)
    assert stopped.value.code == 75
    assert Notes(noted).is_stopped(0)
    out = capsys.readouterr().out
    assert "Stopped after step 10 (epoch 1): rank 0: " in out and "got USR1" in out
    assert f"To resume from {tmp_path}/checkpoints/step-00000010.pt" in out
    assert f"if the job is not requeued: the same command with CLUSTER_DDP_RUN_DIR={tmp_path}" in out
    second = train(world, tmp_path, seed=99)
    assert f"Resuming from {tmp_path}/checkpoints/step-00000010.pt: step 10, epoch 1, 40 of its 40 samples seen" in (
        capsys.readouterr().out
    )
    assert first.evaluations == 0 and second.evaluations == 2  # the one that was broken off is made again
    assert first.records + second.records == whole[0].records
    assert second.digest == whole[0].digest


def test_what_is_done_is_not_done_again(world: World, tmp_path: Path, whole: dict[int, Run]) -> None:
    train(world, tmp_path, seed=1, every="1epoch")
    again = train(world, tmp_path, seed=99, every="1epoch")
    assert again.records == [] and again.evaluations == 0
    assert again.digest == whole[0].digest
    assert metrics(tmp_path) == list(range(1, 21))
    longer = train(world, tmp_path, seed=99, every="1epoch", epochs=3)  # more epochs than before
    assert [record[:2] for record in longer.records] == [(2, step) for step in range(10)]


# When it saves


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("1epoch", [10, 20, 30, 40, 50]),
        ("2epochs", [20, 40, 50]),
        ("7steps", [7, 14, 21, 28, 35, 42, 49, 50]),
        ("25steps", [25, 50]),
        ("1min", [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45, 48, 50]),
        ("never", []),
    ],
)
def test_how_often_it_saves(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str, expected: list[int]
) -> None:
    """And in the end, where it was not just then. A step takes 25 s on a clock of its own."""
    now = [1000.0]
    monkeypatch.setattr(saver, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))

    def tick(checkpoint: Checkpointer) -> None:
        checkpoint._folder.writer.wait()
        now[0] += 25

    train(world, tmp_path, seed=1, epochs=5, at=tick, every=every, keep=100)
    assert saved(tmp_path) == expected


def test_in_the_end_all_is_saved_however_slow_the_disk_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """A save is skipped while the one before is written, which is logged once; the last one must not be."""
    write, skips = checkpoint_file.write, "this one is skipped"

    def slowly(path: Path, state: Any) -> str:
        wait_until(lambda: skips in said.text)
        return write(path, state)

    monkeypatch.setattr(folder.checkpoint_file, "write", slowly)
    train(world, tmp_path, seed=1, every="1epoch", patient=False)
    skipped = re.findall(r"before step (\d+) is still being written; this one is skipped", said.text)
    assert skipped and len({*skipped}) == len(skipped)
    assert saved(tmp_path)[-1] == 20


@pytest.mark.fault(
    "the run directory's file system is slow",
    "training does not wait; if a save is due while the one before is being written, it is skipped with a message",
    also=("test_preemption_while_a_save_is_under_way",),
)
def test_a_slow_write_is_named_once_however_many_saves_it_skips(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    write, steps, writes = checkpoint_file.write, [0], list[int]()

    def slowly(path: Path, state: Any) -> str:
        writes.append(min(19, steps[-1] + 4))
        wait_until(lambda: steps[-1] >= writes[-1])
        return write(path, state)

    monkeypatch.setattr(folder.checkpoint_file, "write", slowly)
    options = {"epochs": 1, "size": 80, "every": "1steps", "patient": False}
    train(world, tmp_path, seed=1, at=lambda checkpoint: steps.append(checkpoint.steps), **options)
    assert 1 <= said.text.count("is still being written; this one is skipped") <= len(writes) <= 7


def test_the_state_saved_is_the_steps_however_slow_the_disk_is(
    world: World, tmp_path: Path, whole: dict[int, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is written, training continues; and its memory is not used again before."""
    write, is_asked = checkpoint_file.write, threading.Event()

    def slowly(path: Path, state: Any) -> str:
        assert is_asked.wait(scaled(LIMIT_S))
        return write(path, state)

    def stop(checkpoint: Checkpointer) -> None:
        signalled(checkpoint)
        is_asked.set()

    with monkeypatch.context() as patch:
        patch.setattr(folder.checkpoint_file, "write", slowly)
        first = end_at(world, tmp_path, 7, stop, every="3steps", keep=10, patient=False)
    assert saved(tmp_path) == [3, 7]
    (tmp_path / "checkpoints" / "step-00000007.pt").unlink()
    second = train(world, tmp_path, seed=99)
    assert first.records[:3] + second.records == whole[0].records
    assert second.digest == whole[0].digest


def test_a_save_that_fails_costs_that_checkpoint_only(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoints"

    def hinder(checkpoint: Checkpointer) -> None:
        checkpoint._folder.writer.wait()
        if checkpoint.steps + 1 == 6:
            shutil.rmtree(path)
            path.write_text("in the way")
        if checkpoint.steps + 1 == 8:
            path.unlink()

    done = train(world, tmp_path, seed=1, at=hinder)
    assert done.digest == whole[0].digest
    assert "step-00000006.pt failed: File exists. Training continues" in said.text
    assert saved(tmp_path) == [15, 18, 20]


class Odd:
    """A part whose state is what a test gives it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["value"]


def test_what_cannot_be_saved_is_told_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\['sampler'\]\['value'\]\[0\] is a function"):
        train(world, tmp_path, seed=1, more={"sampler": Odd([lambda: 0])})


def test_a_tensor_split_in_two_dimensions_is_refused_at_once(world: World, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor  # imports 900 modules, in each collecting process

    mesh = init_device_mesh("cpu", (1, 1))
    own = Odd({"ema": distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])})
    with pytest.raises(CheckpointError, match=r"\['ema'\] is split as .*tensor parallelism is not supported"):
        Checkpointer(world, run_dir=tmp_path, own=own)


def test_a_model_without_values_is_refused_at_once(world: World, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"\['weight'\] has no values"):
        Checkpointer(world, run_dir=tmp_path, model=model)


def test_a_part_of_ones_own_comes_back(world: World, tmp_path: Path) -> None:
    end_at(world, tmp_path, 5, more={"own": Odd({"ema": torch.ones(3), "names": ("a", "b")})})
    own = Odd(None)
    train(world, tmp_path, seed=99, more={"own": own})
    assert own.state["ema"].tolist() == [1, 1, 1] and own.state["names"] == ("a", "b")


@pytest.mark.parametrize(
    "options", [{"every": "soon"}, {"stop_signals": ("USR3",)}, {"keep": 0}], ids=["interval", "signal", "keep"]
)
def test_options_that_there_are_not(world: World, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        train(world, tmp_path, seed=1, **options)


def test_parts_are_copied_into_one_memory_only(world: World, tmp_path: Path) -> None:
    """It is pinned and as large as model and optimizer together: twice of it is too much."""
    state = torch.ones(1000)
    done = train(world, tmp_path, seed=1, epochs=1, more={"big": Odd(state)})
    parts = done.checkpoint._state._states()
    nbytes = sum(tensor.nbytes for tensor in torch.utils._pytree.tree_leaves(parts) if isinstance(tensor, torch.Tensor))
    assert state.nbytes < nbytes <= len(done.checkpoint._state.host_copy._whole._memory) < nbytes + 64 * 40


def test_a_training_that_was_left_frees_its_memory_at_once(world: World, tmp_path: Path) -> None:
    """Not when garbage is collected: the copy of its state is as large as the state, and its loaders have workers."""
    gc.collect()
    gc.disable()
    try:
        checkpoint = Checkpointer(world, run_dir=tmp_path, model=(model := torch.nn.Linear(2, 1)))
        for _ in checkpoint.until(2):
            checkpoint.step()
            break
        checkpoint._saver.save_now()
        left = [weakref.ref(one) for one in (model, checkpoint._state, checkpoint._saver)]
        assert saved(tmp_path) == [1]
        checkpoint._stop_flag.give_back()  # the handlers refer to the flag only
        del checkpoint, model
        assert [one() for one in left] == [None, None, None]
    finally:
        gc.enable()


# What it resumes from


def test_never_sets_aside_what_an_earlier_job_has_left(world: World, tmp_path: Path) -> None:
    end_at(world, tmp_path, 8)
    end_at(world, tmp_path, 5, resume="never")
    assert saved(tmp_path) == [3] and metrics(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "checkpoints.1" / "step-00000006.pt").exists()
    assert metrics(tmp_path, "metrics.1.jsonl") == list(range(1, 9))
    done = train(restarted(world), tmp_path, seed=99, resume="never")  # requeued: it resumes all the same
    assert done.records[0][:2] == (0, 3)
    assert metrics(tmp_path) == list(range(1, 21))
    assert not (tmp_path / "checkpoints.2").exists() and not (tmp_path / "metrics.2.jsonl").exists()


@pytest.mark.parametrize(("resume", "name"), [("never", "checkpoints"), ("auto", "metrics.jsonl")])
def test_earlier_files_that_cannot_be_changed_are_a_short_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, name: str
) -> None:
    end_at(world, tmp_path, 8)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    owner, function = {"checkpoints": (Path, "rename"), "metrics.jsonl": (os, "ftruncate")}[name]
    monkeypatch.setattr(owner, function, refused)
    with pytest.raises(RunDirError, match=r"(?s)Writing to the run directory .*Permission denied\."):
        end_at(world, tmp_path, 5, resume=resume)


@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_an_earlier_runs_records_are_never_cut(world: World, tmp_path: Path, resume: str) -> None:
    """Also where this run saved a checkpoint before it had anything to record."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 77}\n')
    if resume == "PATH":
        end_at(world, tmp_path / "other", 5)
        resume = str(tmp_path / "other")
    for attempt in range(2):
        shard = world.shard(Noisy(40), batch_size=4, shuffle_seed=3)
        checkpoint = Checkpointer(
            restarted(world, restart_count=attempt),
            shard=shard,
            run_dir=RunDir(path, world),
            every="1step",
            resume=resume if resume == "never" else "auto",
            own=Odd(1),
        )
        for _ in checkpoint.epochs(1):
            for _ in shard:
                checkpoint.step()
                break
            break
        checkpoint._folder.writer.wait()
    assert [77] in [metrics(path, found.name) for found in path.glob("metrics*.jsonl")]


def test_without_a_checkpoint_it_begins(world: World, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """A job that was killed before its first checkpoint; what it has recorded is set aside."""
    end_at(world, tmp_path, 2)
    done = train(restarted(world, job_id=12), tmp_path, seed=1)
    assert len(done.records) == 20 and metrics(tmp_path) == list(range(1, 21))
    assert metrics(tmp_path, "metrics.1.jsonl") == [1, 2]
    assert f"This is restart 1 of job 12, and there is no checkpoint in {tmp_path}/checkpoints yet." in said.text


def test_beginning_with_another_runs_checkpoint(
    world: World, tmp_path: Path, whole: dict[int, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    other, ours = tmp_path / "other", tmp_path / "ours"
    first = end_at(world, other, 9)
    before = names_in(other)
    first_path = other / "checkpoints" / "step-00000003.pt"
    end_at(world, ours, 5, seed=99, resume=str(first_path))
    assert f"Resuming from {first_path}: step 3" in capsys.readouterr().out
    assert metrics(ours) == [4, 5]
    second = train(world, ours, seed=98, resume=str(first_path))
    assert first.records[:3] + second.records == whole[0].records and second.digest == whole[0].digest
    assert names_in(other) == before


def names_in(run_dir: Path) -> list[str]:
    """Without what the sampler of this process writes once the next training begins."""
    return sorted(path.name for path in run_dir.rglob("*") if not path.match("usage-*.jsonl"))


def test_its_own_checkpoint_comes_before_a_path(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a requeued job resumes, and does not begin again with what it was begun with."""
    other, ours = tmp_path / "other", tmp_path / "ours"
    end_at(world, other, 14)
    end_at(world, ours, 5)
    capsys.readouterr()
    train(world, ours, seed=99, resume=str(other))
    assert f"Resuming from {ours}/checkpoints/step-00000003.pt" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="there is no such file"):
        train(world, tmp_path / "new", seed=99, resume=str(tmp_path / "missing"))


def test_a_damaged_newest_costs_the_steps_since_the_one_before(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture
) -> None:
    first = end_at(world, tmp_path, 10)
    os.truncate(tmp_path / "checkpoints" / "step-00000009.pt", 3000)
    second = train(world, tmp_path, seed=99)
    assert "step-00000009.pt is damaged" in said.text
    assert first.records[:6] + second.records == whole[0].records and second.digest == whole[0].digest
    assert metrics(tmp_path) == list(range(1, 21))


def make_directory(path: Path) -> None:
    path.mkdir()


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def edit(*keys: Any, value: Any = None) -> Callable[[Path], None]:
    """Change what a checkpoint holds, or leave it out; its digest is right."""

    def rewrite(path: Path) -> None:
        state: Any = checkpoint_file.read(path.with_name("step-00000009.pt"))
        place = state
        for key in keys[:-1]:
            place = place[key]
        if not keys:
            pass
        elif value is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value
        checkpoint_file.write(path, state)

    return rewrite


def malicious(path: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path.with_name("ran")),)

    checkpoint_file.write(path, {"position": {}, "parts": {}, "ranks": [], "attack": Call()})
    content = path.read_bytes()
    with pytest.raises(KeyError, match="ran"):  # the attack is a real one
        raise KeyError(torch.load(path, weights_only=False) and str([*path.parent.glob("ran")]))
    path.with_name("ran").rmdir()
    assert path.read_bytes() == content


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "directory": (make_directory, "it is not a file"),
    "dangling link": (make_dangling_link, "it is a dangling symbolic link"),
    "no step": (edit("position", "steps"), r"its content\['position'\] has no steps"),
    "step as a text": (edit("position", "steps", value="9"), r"its content\['position'\]\['steps'\] is a str"),
    "no place in a shard": (edit("shards", 0, "seen"), "the place in shard 0 has no seen"),
    "no saved_by": (edit("saved_by"), "its content has no saved_by"),
    "no run": (edit("saved_by", "run"), r"its content\['saved_by'\] has no run"),
    "no metrics_bytes": (edit("metrics_bytes"), "its content has no metrics_bytes"),
    "a part as a list": (edit("parts", "model", value=[1]), "the state of its model is a list"),
    "no random numbers": (edit("ranks", 0, "rng", "torch"), r"the state of rank 0\['rng'\] has no torch"),
    "no rank": (edit("ranks", value=[]), "it has no rank's state"),
    "beyond the data": (edit("shards", 0, "seen", value=44), "the place in shard 0 is batch 9, sample 44 of 40"),
    "before the data": (edit("shards", 0, "step", value=-1), "the place in shard 0 is batch -1, sample 36 of 40"),
    "before the training": (edit("position", "epoch", value=-1), "its epoch is -1"),
    "another step by its name": (edit(), "it is of step 9, and its name says step 10"),
    "of another run": (edit("saved_by", "run", value="0123"), r"another run has saved it \(job None\)"),
    "malicious": (malicious, r"it contains posix\.mkdir, but only tensors"),
}


@pytest.mark.fault(
    "the newest checkpoint is truncated, bit-flipped, empty, a folder or a dangling link; or its digest is right, but "
    "keys are missing, types are wrong or it is malicious",
    "a message; it is set aside as `*.damaged` and the one before is used. If no content can be used: an error, and "
    "none is set aside (tested on one rank)",
    also=("test_scancel_is_final_and_a_new_job_goes_on", "tests/ranks/runtime/checkpoint/test_checkpoint_file.py"),
)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(one, marks=() if one in ("directory", "no step", "malicious") else pytest.mark.full)
        for one in UNUSABLE
    ],
)
def test_one_that_cannot_be_used_costs_the_steps_since_the_one_before(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture, what: str
) -> None:
    end_at(world, tmp_path, 10)
    make, words = UNUSABLE[what]
    newest = tmp_path / "checkpoints" / "step-00000010.pt"
    make(newest)
    second = train(world, tmp_path, seed=99)
    assert re.search(rf"{newest} (is damaged|can't be used): {words}", said.text) and "weights_only" not in said.text
    assert second.records == whole[0].records[9:] and second.digest == whole[0].digest
    aside = newest.with_name("step-00000010.pt.damaged")
    assert os.path.lexists(aside) and not newest.with_name("ran").exists()


def damage(path: Path) -> None:
    for one in (path / "checkpoints").glob("step-*.pt"):
        os.truncate(one, 700)


@pytest.mark.fault(
    "all checkpoints are damaged",
    "if a job resumes from them: an error, nothing is changed. A requeued job logs an error, sets them aside and "
    "starts the training over",
    bound="seconds",
    also=("test_where_all_are_damaged_a_requeued_job_begins_again_and_says_so",),
)
def test_where_all_are_damaged_the_user_decides(world: World, tmp_path: Path) -> None:
    """Before, a new start began at step 0 without a word, and set aside what might have been saved."""
    end_at(world, tmp_path, 10)
    damage(tmp_path)
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(CheckpointError, match=r"all checkpoints are damaged\. step-00000009") as error:
            train(world, tmp_path, seed=1, resume=resume)
        assert f"mv {tmp_path}/checkpoints {tmp_path}/checkpoints.damaged" in error.value.hint
        assert saved(tmp_path) == [3, 6, 9] and metrics(tmp_path) == list(range(1, 11))
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):  # --restarts, after that error
        train(restarted(world, job_id=13), tmp_path, seed=1)
    assert train(world, tmp_path, seed=1, resume="never").records[0][:2] == (0, 0)
    assert len([*(tmp_path / "checkpoints.1").iterdir()]) == 3


def test_where_all_are_damaged_a_requeued_job_begins_again_and_says_so(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture
) -> None:
    end_at(world, tmp_path, 10)
    damage(tmp_path)
    done = train(restarted(world), tmp_path, seed=1)
    assert done.records == whole[0].records and metrics(tmp_path) == list(range(1, 21))
    (told,) = [one.getMessage() for one in said.records if one.levelno == logging.ERROR]
    assert told == (
        f"All 3 checkpoints in {tmp_path}/checkpoints are damaged: nothing there is left to resume from. "
        "The training begins again."
    )
    assert said.text.count("It is renamed to step-0000000") == 3 and "the one before is used" not in said.text


def test_never_begins_again_whatever_is_there(world: World, tmp_path: Path) -> None:
    """As the hint of the error says that none can be used."""
    end_at(world, tmp_path, 10)
    for path in (tmp_path / "checkpoints").glob("step-*.pt"):
        malicious(path)
    with pytest.raises(CheckpointError, match="--resume never"):
        train(world, tmp_path, seed=1)
    assert train(world, tmp_path, seed=1, resume="never").records[0][:2] == (0, 0)


@pytest.mark.fault(
    "a checkpoint is from another run, has another step than its name, or more samples than the data",
    "set aside; the one before is used. If none is left: an error, and none is set aside",
    also=("test_one_that_cannot_be_used_costs_the_steps_since_the_one_before",),
)
def test_another_runs_checkpoint_is_set_aside(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture
) -> None:
    """It fits in all but the run: it is another seed's."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    end_at(world, ours, 5)
    end_at(world, other, 10, seed=7)
    shutil.copy(other / "checkpoints" / "step-00000009.pt", ours / "checkpoints")
    done = train(world, ours, seed=99)
    assert "step-00000009.pt can't be used: another run has saved it" in said.text
    assert done.records == whole[0].records[3:] and done.digest == whole[0].digest
    assert (ours / "checkpoints" / "step-00000009.pt.damaged").exists()
    shutil.copy(other / "checkpoints" / "step-00000009.pt", ours / "checkpoints" / "step-00000099.pt")
    for path in ours.glob("checkpoints/step-000000[12]*.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="another run has saved it"):  # nothing of its own is left
        train(restarted(world), ours, seed=99)


@pytest.mark.parametrize("what", ["the whole run directory", "its checkpoints"])
def test_a_copied_run_directory_resumes(
    world: World, tmp_path: Path, whole: dict[int, Run], said: pytest.LogCaptureFixture, what: str
) -> None:
    first, copied = tmp_path / "first", tmp_path / "copied"
    end_at(world, first, 10)
    name = "" if what == "the whole run directory" else "checkpoints"
    shutil.copytree(first / name, copied / name)
    end_at(world, copied, 13, seed=99)
    done = train(restarted(world), copied, seed=98)
    assert done.records == whole[0].records[12:] and done.digest == whole[0].digest and "can't be used" not in said.text
    shutil.copy(copied / "checkpoints" / "step-00000020.pt", first / "checkpoints")
    train(world, first, seed=1)
    assert "another run has saved it" not in said.text


@pytest.mark.parametrize("what", ["malicious", "no saved_by"])
def test_where_none_can_be_used_nothing_is_set_aside(world: World, tmp_path: Path, what: str) -> None:
    """Not even for a requeued job: it would begin anew, where another version of torch could read them all."""
    end_at(world, tmp_path, 10)
    make, words = UNUSABLE[what]
    for path in sorted((tmp_path / "checkpoints").iterdir()):
        make(path)
    before = saved(tmp_path)
    with pytest.raises(CheckpointError, match=words) as error:
        train(restarted(world), tmp_path, seed=1)
    assert "step-00000009.pt" in error.value.asked and "weights_only" not in str(error.value)
    assert saved(tmp_path) == before and not (tmp_path / "checkpoints" / "ran").exists()


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (
            ("model", "0.weight"),
            torch.zeros(5, 3, dtype=torch.float64),
            "0.weight is torch.float64 there and torch.float32",
        ),
        (("model", "0.weight"), "x", r"0.weight is str there and \(5, 3\) here"),
        (("scheduler", "last_epoch"), "1", "it has another scheduler: last_epoch is str there and a number here"),
        (("optimizer", "state"), None, "it does not accept its state in the checkpoint: KeyError: 'state'"),
        (("optimizer", "state"), {0: 1}, "it does not accept its state in the checkpoint"),
    ],
)
def test_a_part_of_another_kind_is_told_in_words(
    world: World, tmp_path: Path, keys: tuple[str, ...], value: Any, words: str
) -> None:
    end_at(world, tmp_path, 10)
    edit("parts", *keys, value=value)(tmp_path / "checkpoints" / "step-00000009.pt")
    with pytest.raises(CheckpointError, match=words):
        train(world, tmp_path, seed=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 6}, r"it has another model: 0.weight is \(5, 3\) there and \(6, 3\) here"),
        ({"size": 44}, "its number of samples in the dataset is 40, and here it is 44"),
        ({"data_seed": 4}, "its seed of the shuffle is 3, and here it is 4"),
        ({"identity": {"dataset": "b"}}, "its dataset is 'a', and here it is 'b'"),
        ({"meters": ()}, "its meters are loss, and here they are none"),
        ({"more": {"ema": Odd(1)}}, "it holds model, optimizer, scheduler, and here there are .*, ema"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    world: World, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    end_at(world, tmp_path, 5, identity={"dataset": "a"})
    for resume in ("auto", str(tmp_path / "checkpoints" / "step-00000003.pt")):
        run_dir = tmp_path if resume == "auto" else tmp_path / "new"
        with pytest.raises(CheckpointError, match=words) as error:
            train(world, run_dir, seed=1, **{"identity": {"dataset": "a"}, "resume": resume, **options})
        assert "step-00000003.pt" in error.value.asked
        assert "--run-dir" in error.value.hint and "--resume never" in error.value.hint
    assert saved(tmp_path) == [3] and metrics(tmp_path) == [1, 2, 3, 4, 5]  # nothing was lost


def test_another_array_tasks_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    def task(number: int) -> World:
        return restarted(world, job_id=20 + number, array_job_id=20, array_task_id=number)

    end_at(task(1), tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"it is array task 1's \(job 20_1\), and this is array task 2"):
        train(task(2), tmp_path, seed=1)
    assert train(task(1), tmp_path, seed=1).records[0][:2] == (0, 3)


class Changed:
    """A small training with settings and data that a user may change between two runs."""

    def __init__(self, world: World, path: Path, *, shift: float = 0.0, lr: float = 0.1, gamma: float = 0.5) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(12.0).view(4, 3) + shift)
        self.shard = world.shard(data, batch_size=2, shuffle_seed=1)
        model = torch.nn.Linear(3, 1)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma)
        parts: dict[str, Any] = {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpoint = Checkpointer(world, shard=self.shard, run_dir=RunDir(path, world), every="1steps", **parts)

    def epoch(self) -> None:
        for _ in self.checkpoint.epochs(self.checkpoint.epoch + 1):
            for _ in self.shard:
                self.optimizer.step()
                self.checkpoint.step()
            self.scheduler.step()


def test_what_differs_is_told_and_not_what_training_has_changed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(**options: float) -> list[str]:
        one = Changed(world, tmp_path, **options)
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        one.epoch()
        assert one.scheduler.gamma == 0.5 and one.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**one.checkpoint.epoch
        return lines[1:]

    assert told() == [] and told() == []
    lr = [
        f"optimizer: param_groups[{number}].{key} is 0.2 in the script; 0.1, from the start of this training, is used"
        for number in (0, 1)
        for key in ("lr", "initial_lr")
    ]
    assert set(lr) < set(told(lr=0.2))
    assert set(lr) < set(told(lr=0.2)), "each time, as long as it is so"
    assert told(gamma=0.7) == ["scheduler: gamma is 0.7 in the script; 0.5, from the start of this training, is used"]
    (words,) = told(shift=1)
    assert re.fullmatch(r"the dataset has the fingerprint \w{12}, instead of \w{12}: is it the same data\?", words)


# Another number of ranks


def resize() -> None:
    """One epoch of 100 samples; in the first run, rank 1 is told to stop at its fourth step, all do after the fifth."""
    with cluster_ddp.distributed(cuda=False) as world:
        stop_agreement.AGREE_EVERY_S = 0.0
        torch.manual_seed(world.world_size)
        shard = world.shard(Noisy(100), batch_size=4, shuffle_seed=3)
        model = world.wrap(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        world.seed_rank(1)
        meter = Meter(world)
        checkpoint = Checkpointer(world, shard=shard, meters={"loss": meter}, model=model, optimizer=optimizer)
        told: dict[str, Any] = {"begin": hashlib.sha256(_bytes(model.module)).hexdigest(), "counts": [], "samples": []}
        told["begin count"] = sum(world.gather(meter.count))
        told["momentum"] = hashlib.sha256(repr(optimizer.state_dict()).encode()).hexdigest()
        try:
            for _ in checkpoint.epochs(1):
                for indices, samples in shard:
                    optimizer.zero_grad()
                    model(samples).square().mean().backward()
                    optimizer.step()
                    meter.add(torch.ones(()), len(indices))
                    told["samples"] += indices.tolist()
                    told["drawn"] = torch.rand(()).item()
                    if (world.world_size, world.rank, checkpoint.steps) == (3, 1, 3):
                        os.kill(os.getpid(), signal.SIGTERM)
                    checkpoint.step()
        finally:
            told["end"] = hashlib.sha256(_bytes(model.module)).hexdigest()
            told["end momentum"] = hashlib.sha256(repr(optimizer.state_dict()).encode()).hexdigest()
            told["mean"] = meter.mean()
            told["end count"] = sum(world.gather(meter.count))
            print(json.dumps(told), flush=True)


@pytest.mark.fault(
    "resumed on another number of ranks",
    "a message; weights are exact, the place in the data follows the sample count, random streams are new",
    also=("test_the_last_requeue_and_another_number_of_ranks",),
)
def test_fewer_ranks_go_on_with_the_rest_of_the_epoch(tmp_path: Path) -> None:
    runs = []
    for world_size in (3, 2):
        env = {"CLUSTER_DDP_RUN_DIR": str(tmp_path / "run")}
        steps = [slurm_step(rank, world_size, job_id=JOB_ID + world_size, **env) for rank in range(world_size)]
        ends = run_ranks(resize, steps, tmp_path)
        assert {end.exit_code for end in ends} == {75 if world_size == 3 else 0}, ends
        runs.append([json.loads(next(line for line in end.output.splitlines() if line[0] == "{")) for end in ends])
        for rank in range(world_size):
            (tmp_path / f"rank{rank}.log").unlink()
    before, after = runs
    assert {rank["begin"] for rank in after} == {before[0]["end"]}
    assert {rank["momentum"] for rank in after} == {before[0]["end momentum"]}
    samples = [sample for rank in (*before, *after) for sample in rank["samples"]]
    assert sorted(samples) == list(range(100))
    assert sum(len(rank["samples"]) for rank in before) == 60
    assert {rank["begin count"] for rank in after} == {60}
    assert {rank["end count"] for rank in after} == {100}
    assert len({rank["drawn"] for rank in (*before, *after)}) == 5
    assert len({rank["end"] for rank in after}) == 1
    assert "2 ranks instead of 3: same weights and place in the data, new streams of random numbers" in ends[0].output
    assert "a global batch of 8 samples instead of 12 (the batch size is per rank)" in ends[0].output


# World.wrap, which settles what else the first step of a resumed training would


class Asking(torch.nn.Module):
    """A forward with arguments of its own; frozen, empty and odd parameters; buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.bad = torch.nn.Parameter(torch.tensor([float("inf"), float("nan")]))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, power: int) -> torch.Tensor:
        self.calls += 1
        unused = self.empty.sum() + self.complex.real.sum() + self.bad.nan_to_num(posinf=0).sum()
        return self.norm(self.frozen(self.linear(x) ** power)) * self.scale + 0 * unused


def test_wrapping_leaves_a_model_as_it_was(world: World) -> None:
    model = Asking()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator, attributes = torch.get_rng_state(), set(vars(model))
    wrapped = world.wrap(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert set(vars(model)) == attributes and model.calls == 0
    assert model.forward.__func__ is Asking.forward
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(-1), before[name].view(-1)) or name == "bad"
    for _ in range(3):
        wrapped(torch.rand(4, 3), power=2).sum().backward()
    assert model.calls == 3 and model.frozen.weight.grad is None
    assert model.linear.weight.grad is not None and model.norm.num_batches_tracked == 3


def test_a_forward_that_is_the_instances_own_is_kept(world: World) -> None:
    model = torch.nn.Linear(3, 2)
    model.forward = own = lambda x: torch.nn.functional.linear(x, model.weight, model.bias) + 1  # type: ignore[method-assign]
    wrapped = world.wrap(model)
    assert vars(model)["forward"] is own
    x = torch.rand(4, 3)
    assert torch.equal(wrapped(x), own(x))


def test_a_models_hooks_see_its_own_calls_only(world: World) -> None:
    """They expect its arguments, and may change its state."""
    model, seen = torch.nn.Linear(3, 2), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    wrapped = world.wrap(model)
    assert seen == []
    wrapped(torch.rand(4, 3))
    assert seen == [(4, 3), (4, 2)]


def test_a_spectral_norm_is_not_iterated_by_wrapping(world: World) -> None:
    model = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 2))
    before = model.weight_u.clone()
    world.wrap(model)
    assert torch.equal(model.weight_u, before)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_the_buckets_are_settled_before_the_first_step(world: World, options: dict[str, bool]) -> None:
    """The first step's order of adding up is then every step's: a resumed training has no first step of its own."""
    model = world.wrap(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3))), **options)

    def step() -> list[int]:
        model.zero_grad()
        model(torch.rand(2, 3)).sum().backward()
        order = sorted(model.parameters(), key=lambda parameter: parameter.grad.data_ptr())  # type: ignore[union-attr]
        names = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        return [names[id(parameter)] for parameter in order]

    first = [0, 1, 2, 3, 4, 5] if "find_unused_parameters" in options else [5, 4, 3, 2, 1, 0]
    assert [step(), step(), step()] == [first] * 3


@pytest.mark.parametrize(("device", "last"), [("cpu", 200), ("cuda:0", 10)])
def test_on_gpus_ddp_takes_its_times_in_no_later_step(world: World, device: str, last: int) -> None:
    """For that it waits for a GPU, in every hundredth step by default, and a step that is captured may not."""
    model = world_models.wrap(
        torch.nn.Linear(3, 2), torch.device(device), place=False, options={}, synchronize=world.synchronize
    )
    for _ in range(210):
        model(torch.rand(4, 3)).sum().backward()
    assert model._get_ddp_logging_data()["iteration"] in (last, last + 1)


def test_wrapping_works_where_no_gradients_are_asked_for(world: World) -> None:
    with torch.no_grad():
        wrapped = world.wrap(torch.nn.Linear(3, 2))
    assert wrapped.module.weight.grad is None


def of_job(world: World, job_id: int, *, restart_count: int) -> World:
    topology = dataclasses.replace(world.topology, job_id=job_id, restart_count=restart_count)
    return dataclasses.replace(world, topology=topology)


def test_never_holds_for_a_job_that_was_requeued_before_it_began(world: World, tmp_path: Path) -> None:
    """What is there is not its own: it was preempted while it was starting."""
    end_at(of_job(world, 12, restart_count=0), tmp_path, 8)
    run = train(of_job(world, 13, restart_count=1), tmp_path, seed=1, resume="never")
    assert run.records[0][:2] == (0, 0)
    assert (tmp_path / "checkpoints.1" / "step-00000006.pt").exists()


def test_a_stop_that_cannot_save_is_no_stop_in_time(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be queued again for it would lead to the same again."""

    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stop(checkpoint: Checkpointer) -> None:
        if checkpoint.steps == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file, "write", full)
        with pytest.raises(CheckpointError, match="nothing could be saved since step 0"):
            train(world, tmp_path, seed=1, at=stop)
    calls = iter(range(100))
    write = checkpoint_file.write
    monkeypatch.setattr(checkpoint_file, "write", lambda *a: write(*a) if next(calls) == 0 else full())
    with pytest.raises(Stopped):  # there is something new
        train(world, tmp_path, seed=1, at=stop)
    assert saved(tmp_path) == [3]


def hold(path: Path) -> int:
    """Another process takes a lock, until it is killed."""
    reader, writer = os.pipe()
    if child := os.fork():
        assert os.read(reader, 1) == b"x"
        return child
    try:
        fcntl.lockf(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        os.write(writer, b"x")
        time.sleep(120)
    finally:
        os._exit(0)


def test_another_training_in_the_run_directory_ends_this_one(world: World, tmp_path: Path) -> None:
    """Its lock's file was removed, so that another could take it: this one saves nothing more there."""
    others: list[int] = []

    def lose_lock(checkpoint: Checkpointer) -> None:
        if checkpoint.steps == 4:
            (tmp_path / ".lock").unlink()
            others.append(hold(tmp_path / ".lock"))

    try:
        with pytest.raises(RunDirError, match=r"(?s)\.lock was removed or replaced, and .* is using the run directory"):
            train(world, tmp_path, seed=1, at=lose_lock)
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    assert saved(tmp_path) == [3]


def test_a_training_that_is_done_says_so(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(world, tmp_path, seed=1)
    assert train(world, tmp_path, seed=1).records == []
    assert "All is done already (2 epochs): nothing to train." in capsys.readouterr().out


def test_a_state_that_can_no_longer_be_saved_does_not_end_the_training(
    world: World, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    odd = Odd(1)

    def spoil(checkpoint: Checkpointer) -> None:
        odd.state = [len] if checkpoint.steps == 6 else 1

    assert len(train(world, tmp_path, seed=1, at=spoil, more={"odd": odd}, every="7steps", keep=9).records) == 20
    assert "['odd']['value'][0] is a" in said.text
    assert saved(tmp_path) == [10, 14, 20]  # after an epoch's last batch, what could not be saved is made up for


@pytest.mark.parametrize("kind", [str, Path])
def test_a_run_directory_is_a_path_or_its_text(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpointer(world, shard=world.shard(Noisy(4), batch_size=2), run_dir=kind("runs/x"), every="1steps")
    for _ in checkpoint.epochs(1):
        checkpoint.step()
    assert (tmp_path / "runs/x/checkpoints/step-00000001.pt").exists()


def test_a_data_loader_is_no_shard(world: World, tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1)))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(SpecError, match="shard= is a DataLoader: its place in an epoch can't be saved"):
        Checkpointer(world, shard=loader, run_dir=tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()
