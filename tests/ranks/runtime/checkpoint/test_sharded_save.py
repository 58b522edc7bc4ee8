"""A save of two ranks, one of which is killed at any moment: the newest checkpoint is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from points import Points

from cluster_ddp.run import files
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.checkpoint import checkpoint_file, restore
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError
from cluster_ddp.runtime.checkpoint.folder import CheckpointFolder
from cluster_ddp.runtime.checkpoint.sharded import pieces_file, sharded_save
from cluster_ddp.runtime.checkpoint.sharded.resharding import SavedPieces
from cluster_ddp.runtime.checkpoint.sharded.sharded_save import ShardedSave
from cluster_ddp.runtime.model.dtensor_pieces import LocalPieces, Piece

NAME = "state['parts']['model']['weight']"


class KilledError(BaseException):
    """Ends a rank."""


class Kill(Points):
    """At a point, and at each later one: so nothing more changes on disk, as after SIGKILL."""

    def __init__(self, at: int) -> None:
        super().__init__(lambda name: None, at)

    def pass_by(self, name: str) -> None:
        self.left -= 1
        if self.left <= 0:
            raise KilledError(name)


def write(
    rank: int, path: Path, store: dist.Store, step: int, killed_at: int = 10**6, patience_s: float = 30.0
) -> bool:
    """One rank's part of a save of a tensor of 60 elements, of which each has half. Returns whether it was killed."""
    values = torch.full((30,), float(step))
    local = LocalPieces({NAME: Piece((30 * rank,), 0, values)}, {NAME: torch.Size([60])}, values.view(torch.uint8))
    world: Any = SimpleNamespace(rank=rank, is_main=rank == 0)
    state = {"position": {"steps": step}, "parts": {"model": {"weight": values}}, "ranks": [step]}
    folder = CheckpointFolder(path, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_save, "PATIENCE_S", patience_s)
        patch.setattr(sharded_save, "_POLL_S", 0.005)
        patch.setattr(process_group, "ranks_store", store)
        patch.setattr(os, "fsync", lambda descriptor: None)  # it takes long, and this machine does not fail
        Kill(killed_at).install(patch)
        save = ShardedSave(world, local, [0, 1], f"{step:08}", refused)
        try:
            folder._carry_out(path / f"step-{step:08}.pt", state, lambda: None, save, None)
        except KilledError:
            return True
    return False


def refused(found: list[str]) -> NoReturn:
    raise AssertionError(found)


def saved(path: Path, step: int) -> None:
    store = dist.HashStore()
    assert not any(write(rank, path, store, step) for rank in (1, 0)) and newest_step(path) == step


def newest_step(path: Path) -> int | None:
    """The step of the newest checkpoint, all of whose values are its own."""
    found, refused = CheckpointFolder(path, keep=1).newest(pieces_file.check_all)
    assert not refused
    if found is None:
        return None
    saved = checkpoint_file.read(found[0])
    pieces = SavedPieces(found[0], saved)
    values = pieces.read(NAME, saved["parts"]["model"]["weight"], None)
    assert values.shape == (60,) and len(set(values.tolist())) == 1
    assert values[0].item() == saved["position"]["steps"]
    return int(saved["position"]["steps"])


@pytest.mark.fault(
    "a rank of a sharded model (FSDP, HSDP) is killed while it writes its part of a checkpoint, or rank 0 while it "
    "writes the checkpoint; with `--restarts`",
    "all ranks restart and resume from the checkpoint before; the parts of the unfinished one are removed",
    bound="seconds",
    also=("test_a_sharded_training_is_killed_in_its_saves_requeued_and_cut_off",),
)
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("step", [pytest.param(2, id="next"), pytest.param(1, id="again", marks=pytest.mark.full)])
def test_killed_at_any_moment_of_a_save(tmp_path: Path, killed: int, step: int) -> None:
    saved(tmp_path / "before", 1)
    point, found, was_killed = 0, 1, True
    while was_killed:
        point += 1
        path, store = tmp_path / str(point), dist.HashStore()
        shutil.copytree(tmp_path / "before", path)
        ends = [write(1, path, store, step, point if killed == 1 else 10**6)]
        ends += [write(0, path, store, step, point if killed == 0 else 10**6, patience_s=0.0 if ends[0] else 30.0)]
        was_killed = any(ends)
        before, found = found, newest_step(path) or 0
        assert found in (before, step), "once the new one is there, it stays"
        files.remove_leftovers(path)
        pieces_file.remove_orphans(path)
        assert {one.stem for one in path.glob("*.pieces")} == {one.stem for one in path.glob("*.pt")}
        saved(path, 3)
        assert [one.name for one in sorted(path.iterdir())] == ["step-00000003.pieces", "step-00000003.pt"]
    assert point > 20 and found == step


def test_rank_0_of_an_older_start_removes_no_pieces_of_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just written its checkpoint when its node is cut off; the newer start saves under the same name."""
    newer = tmp_path / "step-00000001.pieces" / "rank-1-0000beef.pt"
    publish = checkpoint_file.write

    def cut_off_then(path: Path, state: Any) -> str:
        digest = publish(path, state)
        if path.suffix == ".pt" and path.parent == tmp_path:
            newer.touch()
        return digest

    monkeypatch.setattr(checkpoint_file, "write", cut_off_then)
    saved(tmp_path, 1)
    assert newer.exists()


ASIDE = ["step-00000001.pieces.damaged", "step-00000001.pt.damaged"]


def test_a_checkpoint_that_is_damaged_twice_is_set_aside_twice(tmp_path: Path) -> None:
    """The training has come to its step again meanwhile."""
    for _ in range(2):
        saved(tmp_path, 1)
        restore.put_aside({tmp_path / "step-00000001.pt": DamagedError("its end is missing")}, None)
        assert sorted(one.name for one in tmp_path.iterdir()) == ASIDE
