"""Checkpoints of models that are sharded over the ranks: resumed on the same ranks, on others, and under DDP."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step
from slowness import scaled
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import cluster_ddp
from cluster_ddp import CheckpointError
from cluster_ddp.run.names import File
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.model.ddp import unwrapped
from cluster_ddp.runtime.model.dtensor_pieces import Piece, joined
from cluster_ddp.runtime.run_dir import background_writer

JOB_ID = job_ids()
EPOCHS, STEPS = 3, 12


class Block(nn.Module):
    """Thirteen and 27 rows: the pieces have different sizes, and on four ranks some biases have an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(13, 27), nn.Linear(27, 13), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(self.wide(x).relu()))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 13), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.last = nn.BatchNorm1d(13), nn.Linear(13, 2)
        self.unused = nn.Parameter(torch.zeros(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))  # type: ignore[no-any-return]


class Training:
    """A training with dropout, batch normalisation and Adam, under a strategy."""

    def __init__(self, world: cluster_ddp.World, strategy: str, **options: Any) -> None:
        self.world = world
        torch.manual_seed(0)
        how: dict[str, Any] = {"find_unused_parameters": True} if strategy == "ddp" else {"blocks": Block}
        if strategy == "hsdp":
            rows = torch.arange(world.world_size).view(-1, 2).T  # of four ranks, 0 and 2 have all parts
            how["mesh"] = DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard"))
        self.model = world.wrap(Net(), strategy=strategy, **how)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(1).gt(0).long())
        self.shard = world.shard(data, batch_size=16 // world.world_size, shuffle_seed=1)
        world.seed_rank(3)
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoint = cluster_ddp.Checkpointer(world, shard=self.shard, **{"keep": 9, **parts, **options})

    def steps(self) -> Iterator[int]:
        """Train; yields the number of steps after each one."""
        for _ in self.checkpoint.epochs(EPOCHS):
            for x, y in self.shard:
                torch.nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.checkpoint.step()
                self.checkpoint._saver.wait()  # so that no save is skipped
                yield self.checkpoint.steps

    def digest(self, *, buffers: bool = False) -> str:
        """The SHA-256 of all weights and optimizer states, each whole, and this rank's buffers. A collective."""
        found = hashlib.sha256()
        model = unwrapped(self.model)
        weights = model.state_dict() if buffers else dict(model.named_parameters())
        states = [weights, *self.optimizer.state_dict()["state"].values()]
        for name, value in itertools.chain(*(state.items() for state in states)):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(f"{name} {tuple(whole.shape)}".encode() + whole.detach().numpy().tobytes())
        return found.hexdigest()


def trained(world: cluster_ddp.World, strategy: str, *, buffers: bool = False, **options: Any) -> str:
    training = Training(world, strategy, **options)
    for _ in training.steps():
        pass
    return training.digest(buffers=buffers)


def ran(function: Any, ranks: int, folder: Path, **env: str) -> list[Outcome]:
    for path in folder.glob("rank*.log"):
        path.unlink()
    where = {"RUN": str(folder / "run"), **env}
    steps = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **where) for rank in range(ranks)]
    return run_ranks(function, steps, folder)


def told(ends: list[Outcome]) -> list[Any]:
    """What each rank printed as JSON in its last line."""
    assert all(end.exit_code == 0 for end in ends), "\n".join(end.output for end in ends)
    return [json.loads(end.output.splitlines()[-1]) for end in ends]


def undisturbed_and_resumed() -> None:
    run = Path(os.environ["RUN"])
    with cluster_ddp.distributed(cuda=False) as world:
        if "UNDISTURBED" in os.environ:
            print(json.dumps(trained(world, "fsdp", buffers=True, run_dir=run.with_name("other"), every="never")))
        training = Training(world, "fsdp", run_dir=run, every="2steps")
        for step in training.steps():
            if step == 7 and "UNDISTURBED" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps([training.digest(buffers=True), training.checkpoint.steps]))


@pytest.mark.quick
def test_on_the_same_ranks_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Killed between two saves."""
    killed = ran(undisturbed_and_resumed, 2, tmp_path, UNDISTURBED="1")
    expected = [json.loads(next(line for line in end.output.splitlines() if line.startswith('"'))) for end in killed]
    resumed = ran(undisturbed_and_resumed, 2, tmp_path)
    assert told(resumed) == [[one, STEPS] for one in expected]
    assert "Resuming from" in resumed[0].output and "step 6" in resumed[0].output


STRATEGIES = ("fsdp", "hsdp", "ddp")


def save_under_each_strategy() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        run = Path(os.environ["RUN"])
        print(json.dumps({one: trained(world, one, run_dir=run / one, every="4steps") for one in STRATEGIES}))


def load_under_each_strategy() -> None:
    """Resume at the last step what each strategy has saved."""
    run, found = Path(os.environ["RUN"]), {}
    with cluster_ddp.distributed(cuda=False) as world:
        for source in STRATEGIES:
            for strategy in STRATEGIES if world.world_size % 2 == 0 else ("fsdp", "ddp"):
                shutil.rmtree(run / "new", ignore_errors=True) if world.is_main else None
                world.barrier()
                training = Training(world, strategy, run_dir=run / "new", resume=run / source, every="never")
                assert training.checkpoint.steps == STEPS
                found[f"{source} {strategy}"] = training.digest()
        if world.world_size == 2:  # as many as have written, but not the same ones: none of which is not checked
            if world.is_main:
                for step, rank in ((12, 2), (8, 0)):
                    bit_flipped(next((run / "hsdp").glob(f"checkpoints/step-000000{step:02}.pieces/rank-{rank}-*")))
            world.barrier()
            assert Training(world, "fsdp", run_dir=run / "hsdp").checkpoint.steps == 4
        if world.world_size == 1:
            model = Net()
            for source in STRATEGIES:
                cluster_ddp.load_weights(run / source, model)
                assert torch.equal(model.last.weight, unwrapped(training.model).last.weight) or source != STRATEGIES[-1]
        print(json.dumps(found))


@pytest.mark.full
def test_on_other_ranks_and_under_other_strategies_the_state_is_the_same(tmp_path: Path) -> None:
    saved = told(ran(save_under_each_strategy, 4, tmp_path))[0]
    names = {path.name.split("-")[1] for path in (tmp_path / "run" / "hsdp").glob("checkpoints/step-00000012.pieces/*")}
    assert names == {"0", "2"}, "of HSDP, the first replica writes"
    for ranks in (4, 1, 2):
        for found in told(ran(load_under_each_strategy, ranks, tmp_path)):
            assert len(found) == 9 if ranks > 1 else 6
            assert all(digest == saved[name.split()[0]] for name, digest in found.items()), found


def bit_flipped(step: Path) -> None:
    content = bytearray(step.read_bytes())
    content[len(content) // 2] ^= 1
    step.write_bytes(content)


class Planted:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["KEPT"],)


DAMAGES: dict[str, Any] = {
    "a flipped bit": bit_flipped,
    "missing": lambda shard: shard.unlink(),
    "of an earlier step": lambda shard: shutil.copy(next(_of_step(shard, 10).glob("rank-1-*")), shard),
    "cut off": lambda shard: os.truncate(shard, 100),
}


def _of_step(shard: Path, step: int) -> Path:
    return shard.parent.with_name(f"step-{step:08}.pieces")


def resume_from_damaged() -> None:
    run, found = Path(os.environ["RUN"]), {}
    with cluster_ddp.distributed(cuda=False) as world:
        trained(world, "fsdp", run_dir=run, every="2steps")
        for number, (name, damage) in enumerate(DAMAGES.items()):
            copy = run.with_name(f"copy {number}")
            if world.is_main:
                shutil.copytree(run, copy, ignore=shutil.ignore_patterns(File.STACK.format("*")))  # ranks move theirs
                damage(next((copy / "checkpoints" / "step-00000012.pieces").glob("rank-1-*")))
                for orphan in ("step-00000012.pieces.damaged", "step-00000011.pieces"):
                    shutil.copytree(run / "checkpoints" / "step-00000010.pieces", copy / "checkpoints" / orphan)
            world.barrier()
            with pytest.raises(CheckpointError, match="is damaged: its pieces file rank-1-"):
                cluster_ddp.load_weights(copy / "checkpoints" / "step-00000012.pt", Net())
            world.barrier()
            training = Training(world, "fsdp", run_dir=copy)
            assert not (copy / "checkpoints" / "step-00000011.pieces").exists()
            before = {path.name for path in run.glob("checkpoints/step-00000010.pieces/*")}
            aside = {path.name for path in copy.glob("checkpoints/step-00000012.pieces.damaged/*")}
            assert not aside & before, "of a damaged one before"
            assert not (copy / "checkpoints" / "step-00000012.pieces").exists()
            found[name] = [training.checkpoint.steps, sorted(path.name for path in copy.glob("checkpoints/*.damaged"))]
        print(json.dumps(found))


@pytest.mark.fault(
    "a part of a sharded checkpoint is missing, truncated, bit-flipped or of another save",
    "the log names the part; the file and its folder are set aside as `*.damaged`, and the checkpoint before is used",
)
@pytest.mark.full
def test_damaged_pieces_are_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    ends = ran(resume_from_damaged, 2, tmp_path)
    aside = [10, ["step-00000012.pieces.damaged", "step-00000012.pt.damaged"]]
    assert told(ends) == [dict.fromkeys(DAMAGES, aside)] * 2
    assert ends[0].output.count("is damaged: its pieces file rank-1-") == len(DAMAGES)


def fail_on_rank_1() -> None:
    """Its disk is full in steps 3 and 4, it has NaN in steps 6 and 7, and it is killed as it saves step 10."""
    run = Path(os.environ["RUN"])
    with cluster_ddp.distributed(cuda=False) as world:
        training = Training(world, "fsdp", run_dir=run, every="1steps", keep=2)
        checkpoint, write, is_odd = training.checkpoint, pieces_file.write, world.rank == 1

        def broken(path: Path, local: Any) -> dict[str, Any]:
            if is_odd and checkpoint.steps == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_odd and checkpoint.steps in (3, 4):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, local)

        pieces_file.write = broken
        for step in training.steps():
            world.print(f"step {step}: {checkpoint.last_good and checkpoint.last_good.stem}")
            if step == 5:
                checkpoint.best("loss", 0.5, mode="min")
            if is_odd and step in (5, 7):
                training.model.unused.to_local().detach().fill_(float("nan") if step == 5 else 0.0)


@pytest.mark.fault(
    "one rank of a sharded training can't write its part, such as on a full disk, or its part has NaN",
    "rank 0 names the rank or the entry; that checkpoint is not written, the last good one stays, training continues. "
    "At the end, it is tried again as on a full disk",
    also=("test_the_end_of_a_training_is_saved_once_all_ranks_can",),
)
@pytest.mark.full
def test_what_fails_on_one_rank_costs_that_checkpoint_only(tmp_path: Path) -> None:
    ends = ran(fail_on_rank_1, 2, tmp_path)
    assert [end.exit_code for end in ends] == [1, -signal.SIGKILL]
    output = ends[0].output
    newest = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 6: 5, 7: 5, 8: 8, 9: 9}
    assert re.findall(r"^step .*", output, re.MULTILINE) == [f"step {at}: step-{one:08}" for at, one in newest.items()]
    assert output.count("failed: rank 1: No space left on device. Training continues") == 2
    assert output.count("NaN or Inf in model unused") == 1 and "Training continues" not in ends[1].output
    folder = tmp_path / "run" / "checkpoints"
    for name in ("best-loss.pt", "step-00000009.pt"):
        cluster_ddp.load_weights(folder / name, Net())
    kept = {"best-loss", "step-00000008", "step-00000009"}
    assert {one.stem for one in folder.glob("*.pt")} == kept
    assert {one.stem for one in folder.glob("*.pieces")} == {*kept, "step-00000010"}, "those of failed saves are gone"


def fail_at_the_end() -> None:
    """As step 4 is saved the disk is full for both ranks, as step 11 for rank 0, and then for rank 1 for a while."""
    run, write, tries = Path(os.environ["RUN"]), pieces_file.write, Counter[str]()
    background_writer._EVERY_S, background_writer.PATIENCE_S = 0.2, scaled(20)
    with cluster_ddp.distributed(cuda=False) as world:
        odd = Odd()
        training = Training(world, "fsdp", run_dir=run, every="1steps", odd=odd)

        def broken(path: Path, local: Any) -> dict[str, Any]:
            step, last = path.parent.stem.removeprefix("step-000000"), {"04": 2, "11": 1 - world.rank, "12": 3}
            tries[step] += 1
            if step == "11" and world.rank == 1:
                time.sleep(3.0)
            if tries[step] <= last.get(step, 0) * (step != "12" or world.rank):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(path, local)

        pieces_file.write = broken
        for step in training.steps():
            if step == 4:
                training.checkpoint._saver.save_copy()
                last_good = training.checkpoint.last_good
                assert last_good is None or last_good.stem == "step-00000003"
            odd.value = {1} if step == 5 and world.rank == 1 else 0
            if step in (4, 8):
                training.checkpoint.best("loss", 1 / step, mode="min")
                training.checkpoint._saver.wait()
                assert (run / "checkpoints" / "best-loss.pt").exists()


@pytest.mark.full
def test_the_end_of_a_training_is_saved_once_all_ranks_can(tmp_path: Path) -> None:
    ends = ran(fail_at_the_end, 2, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert "step-00000012.pt is not saved: rank 1: No space left on device" in ends[0].output
    assert "is still being written; this one is skipped" not in ends[0].output
    assert ends[0].output.count("['odd']['value'] is a set that torch.load does not read") == 1
    folder, model = tmp_path / "run" / "checkpoints", Net()
    assert not (folder / "step-00000004.pt").exists() and not (folder / "step-00000011.pt").exists()
    assert cluster_ddp.load_weights(tmp_path / "run", model).stem == "step-00000012"
    cluster_ddp.load_weights(folder / "best-loss.pt", model)
    assert len(list((folder / "best-loss.pieces").iterdir())) == 2, "those of the first best one are gone"


def refuse_together() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        model = Net()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        model = world.wrap(model, strategy="fsdp", blocks=Block)
        for parts in ({"optimizer": early}, {"own": Odd({1, 2}) if world.rank else model}):
            with pytest.raises(CheckpointError) as error:
                cluster_ddp.Checkpointer(world, run_dir=os.environ["RUN"], model=model, **parts)
            print(error.value.found)
        cluster_ddp.Checkpointer(world, run_dir=os.environ["RUN"], model=model).finish()
        smaller = Net()
        smaller.last = nn.Linear(13, 1)
        for one in (smaller, world.wrap(smaller, strategy="fsdp", blocks=Block)):
            with pytest.raises(CheckpointError, match=r"size mismatch for last.weight: .*\[2, 13\]"):
                cluster_ddp.load_weights(os.environ["RUN"], one)


class Odd:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def test_what_can_not_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for end in ran(refuse_together, 2, tmp_path):
        assert end.exit_code == 0, end.output
        assert "optimizer has parameters that no module here has" in end.output
        assert "state['parts']['own']['value'] is a set that torch.load does not read" in end.output


def test_a_tensor_of_which_a_piece_is_missing_is_not_read() -> None:
    with pytest.raises(ValueError, match="its pieces have 2 of 3 elements"):
        joined((3,), (1,), torch.float32, [Piece((0,), 0, torch.ones(3))])


def test_planted_code_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in a pieces file that the checkpoint names with its SHA-256."""
    monkeypatch.setenv("KEPT", str(tmp_path / "kept"))
    path = tmp_path / "step-00000001.pt"
    folder = pieces_file.folder_of(path)
    folder.mkdir()
    sha256 = checkpoint_file.write(folder / "rank-0-aa-1.pt", {"pieces": Planted(), "index": "{}"})
    described = {"rank": 0, "sha256": sha256, "bytes": (folder / "rank-0-aa-1.pt").stat().st_size}
    position, parts = {"steps": 1, "epoch": 0}, {"model": {"weight": torch.empty(2, device="meta")}}
    ranks = [{"rng": {"torch": torch.zeros(1), "python": (), "numpy": ()}, "buffers": {}, "meters": {}}]
    frame = {
        "saved_by": {"job": "", "array_task": None, "world_size": 1},
        "identity": {},
        "shards": [],
        "metrics_bytes": 0,
        "bests": {},
        "parameters": {},
        "devices": {},
    }
    state = {
        **frame,
        "position": position,
        "parts": parts,
        "ranks": ranks,
        "sharded": {"files": {"rank-0-aa-1.pt": described}},
    }
    checkpoint_file.write(path, state)
    with pytest.raises(CheckpointError, match=r"it contains .*mkdir, but only tensors and plain values are read"):
        cluster_ddp.load_weights(path, nn.Linear(2, 1, bias=False))
    assert not (tmp_path / "kept").exists()
