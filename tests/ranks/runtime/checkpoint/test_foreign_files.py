"""A run removes nothing but its own files, and writes nowhere but in its own run directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cluster_ddp
from cluster_ddp.errors import RunDirError
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.checkpoint.sharded.sharded_save import ShardedSave
from cluster_ddp.runtime.model.dtensor_pieces import LocalPieces, Piece
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.runtime.world import World

STATE: dict[str, Any] = {"parts": {}, "position": {}, "ranks": []}
# Names as those of a pieces file, and others.
OTHERS = ("rank-0-0a1b2c3d-1.pt", "thesis.tex", "rank-0.pt.bak")


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fenced_writes, "_held", None)


def private(folder: Path) -> Path:
    """A folder of the same user, with files that are not the run's."""
    folder.mkdir()
    for name in OTHERS:
        (folder / name).write_text("mine")
    return folder


def save(token: str) -> ShardedSave:
    values = torch.zeros(4)
    local = LocalPieces({"a": Piece((0,), 0, values)}, {"a": values.shape}, values.view(torch.uint8))
    world: Any = SimpleNamespace(rank=0, is_main=True)
    return ShardedSave(world, local, [0], token, lambda names: None)


def test_nothing_that_a_link_in_place_of_pieces_leads_to_is_changed(tmp_path: Path) -> None:
    precious, checkpoint = private(tmp_path / "precious"), tmp_path / "checkpoints" / "step-00000060.pt"
    checkpoint.parent.mkdir()
    pieces_file.folder_of(checkpoint).symlink_to(precious)
    with pytest.raises(OSError, match="Not a directory"):
        save("aa-1").write(checkpoint, STATE)
    pieces_file.remove(checkpoint)
    pieces_file.remove_orphans(checkpoint.parent)
    assert sorted(path.name for path in precious.iterdir()) == sorted(OTHERS)


def test_of_a_folder_of_pieces_only_those_are_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000060.pt"
    for number in (1, 2):
        save(f"aa-{number}").write(checkpoint, STATE)
        (pieces_file.folder_of(checkpoint) / "notes.txt").write_text("mine")
    names = sorted(path.name for path in pieces_file.folder_of(checkpoint).iterdir())
    assert names == ["notes.txt", "rank-0-aa-2.pt"]
    pieces_file.remove(checkpoint)
    assert [path.name for path in pieces_file.folder_of(checkpoint).iterdir()] == ["notes.txt"]


def swap_for_link(run_dir: Path, other: Path) -> None:
    run_dir.symlink_to(other)


def swap_for_folder(run_dir: Path, other: Path) -> None:
    other.rename(run_dir)


@pytest.mark.fault(
    "`step-N.pieces` is a link; the run directory is replaced by another folder or a link while the job runs",
    "nothing that it leads to is changed; the run ends with an error",
    bound="the next write",
    also=("test_nothing_that_a_link_in_place_of_pieces_leads_to_is_changed",),
)
@pytest.mark.parametrize("swap", [swap_for_link, swap_for_folder])
def test_a_run_directory_that_is_replaced_ends_the_run(world: World, tmp_path: Path, swap: Any) -> None:
    """Who may rename it could point its path at another folder of the same user."""
    run_dir, other = tmp_path / "run", private(tmp_path / "private")
    (other / "checkpoints").mkdir()
    (other / "checkpoints" / "step-00000001.pt").write_text("of another training")
    model = torch.nn.Linear(2, 1)
    checkpoint = cluster_ddp.Checkpointer(world, run_dir=run_dir, model=model, every="1steps", keep=1)
    with pytest.raises(RunDirError, match=r"not the folder any more[^$]* Hint: see who may rename it"):
        for done in checkpoint.until(3):
            if done == 1:
                checkpoint._saver.wait()
                run_dir.rename(tmp_path / "moved")
                swap(run_dir, other)
            checkpoint.step()
            if done:
                checkpoint._saver.wait()
    kept = run_dir.resolve()
    assert sorted(path.name for path in kept.iterdir()) == sorted([*OTHERS, "checkpoints"])
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step-00000001.pt"]


def test_a_run_directory_that_was_removed_is_made_again(world: World, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", torch.nn.Linear(2, 1)
    checkpoint = cluster_ddp.Checkpointer(world, run_dir=run_dir, model=model, every="1steps", keep=1)
    for done in checkpoint.until(3):
        if done == 1:
            checkpoint._saver.wait()
            shutil.rmtree(run_dir)
        checkpoint.step()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003.pt"]
