"""The checkpoints of a run, whatever happens to the process, the disk and the folder while one is saved."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from points import Points

from cluster_ddp.errors import CheckpointError
from cluster_ddp.run import files
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.folder import CheckpointFolder, named_by
from cluster_ddp.runtime.checkpoint.restore import put_aside


def state(step: int) -> dict[str, Any]:
    weight = torch.full((40,), float(step))
    return {"position": {"steps": step}, "parts": {"model": {"weight": weight}}, "ranks": [step]}


def nothing() -> None:
    """What must be on disk before a checkpoint: nothing."""


def save(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        folder.save(step, state(step), first=nothing)
    folder.writer.wait()


def newest(folder: CheckpointFolder) -> tuple[Path, str] | None:
    """The newest one that can be used; those that can't are set aside, as when a training resumes."""
    found, refused = folder.newest()
    put_aside(refused, found)
    return found


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def is_whole(path: Path, step: int) -> bool:
    found, expected = checkpoint_file.read(path), state(step)
    return torch.equal(found["parts"]["model"].pop("weight"), expected["parts"]["model"].pop("weight")) and (
        found == expected
    )


def killed_at(point: int, folder: CheckpointFolder, step: int) -> bool:
    """Save in a child process that kills itself at a point; False where it has come to its end before."""
    child = os.fork()
    if child == 0:
        try:
            with pytest.MonkeyPatch.context() as patch:
                Points(lambda _: os.kill(os.getpid(), signal.SIGKILL), point).install(patch)
                folder._write(folder.path / f"step-{step:08}.pt", state(step), nothing, None)
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


@pytest.mark.fault(
    "all ranks get SIGKILL during saves, at any write, fsync, rename or unlink",
    "no checkpoint is ever unreadable; resumes each time",
    also=("test_many_kills_in_the_middle_of_a_save",),
)
@pytest.mark.parametrize(
    ("step", "before"),
    [
        pytest.param(3, [1, 2], id="next"),
        pytest.param(2, [1, 2], id="again", marks=pytest.mark.full),
        pytest.param(1, [], id="first", marks=pytest.mark.full),
    ],
)
def test_killed_at_any_moment_of_a_save(
    tmp_path: Path, said: pytest.LogCaptureFixture, step: int, before: list[int]
) -> None:
    """The newest is whole: the old one until the new one has its name, then always the new one."""
    template = CheckpointFolder(tmp_path / "template", keep=2)
    save(template, *before)
    point, new_is_there = 0, False
    while True:
        point += 1
        folder = CheckpointFolder(tmp_path / f"killed at {point}", keep=2)
        if before:
            shutil.copytree(template.path, folder.path)
        was_killed = killed_at(point, folder, step)
        found_one = newest(CheckpointFolder(folder.path, keep=2))
        found = int(found_one[0].stem.removeprefix("step-")) if found_one else None
        assert found in {step, *before[-1:]} or not before
        assert found == step or not new_is_there
        new_is_there = found == step
        assert found_one is None or is_whole(found_one[0], found or 0)
        files.remove_leftovers(folder.path)
        if folder.path.exists():
            assert all(name.startswith("step-") and name.endswith(".pt") for name in names(folder))
            assert len(names(folder)) <= 3
        if not was_killed:
            break
        save(folder, step + 1)  # the next run's
        assert folder.last_good == folder.files()[0] and is_whole(folder.last_good, step + 1)
        assert len(folder.files()) <= 2
    assert point > 20
    assert not said.records


def test_a_disk_that_fails_at_any_moment_costs_one_checkpoint(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    save(folder, 1, 2)

    def full(name: str) -> None:
        happened.append(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for point in range(1, 1000):
        happened: list[str] = []
        said.clear()
        with pytest.MonkeyPatch.context() as patch:
            Points(full, point).install(patch)
            save(folder, 3)
        if not happened:
            break
        if happened[0].startswith(("unlink", "mkdir")):
            assert not said.records  # the folder is there; that an old one stays is no failure
        elif happened[0] != "replace done":
            (record,) = said.records
            assert record.levelno == logging.ERROR
            assert "step-00000003.pt failed" in record.getMessage()
            assert "Training continues; the last good one is" in record.getMessage()
            assert folder.last_good == folder.path / "step-00000002.pt"
        assert not [name for name in names(folder) if not name.endswith(".pt")], happened
        found, _ = named_by(folder.path)
        assert is_whole(found, int(found.stem[5:]))
        shutil.rmtree(folder.path)  # as before the save
        save(folder, 1, 2)
    assert point > 20
    assert names(folder) == ["step-00000002.pt", "step-00000003.pt"]


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """Also in the middle of torch.save, which then fails once more, in words of its own."""
    folder = CheckpointFolder(tmp_path, keep=2)

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for point in (5, 20, 40):
        said.clear()
        with pytest.MonkeyPatch.context() as patch:
            Points(full, point).install(patch)
            save(folder, 1)
        assert "failed: No space left on device." in said.text


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert folder.files() == [] and newest(folder) is None
    save(folder, 8, 9, 10, 11)
    assert names(folder) == ["step-00000010.pt", "step-00000011.pt"]
    assert folder.last_good == folder.path / "step-00000011.pt"
    other = CheckpointFolder(folder.path, keep=2)
    assert other.last_good is None
    found = newest(other)
    assert found == (folder.last_good, checkpoint_file.digest(folder.last_good))
    assert other.last_good == folder.last_good


def test_numbers_of_more_than_eight_digits_count_as_numbers(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 99_999_998, 99_999_999, 100_000_000)
    assert [path.stem for path in folder.files()] == ["step-100000000", "step-99999999"]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-1.pt.damaged", "best.pt", "step-x.pt", ".step-00000009.pt.0a0b0c0d.tmp", "notes.txt", ".x.tmp"):
        (tmp_path / name).write_text("mine")
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 1, 2)
    files.remove_leftovers(folder.path)
    expected = [".x.tmp", "best.pt", "notes.txt", "step-00000002.pt", "step-1.pt.damaged", "step-x.pt"]
    assert names(folder) == expected


def test_a_damaged_newest_is_set_aside_and_the_one_before_used(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path, keep=4)
    save(folder, 1, 2, 3, 4)
    os.truncate(tmp_path / "step-00000004.pt", 700)
    with open(tmp_path / "step-00000003.pt", "r+b") as damaged:
        damaged.seek(200)
        damaged.write(b"\xff")
    for set_aside in (False, True):
        said.clear()
        found = newest(folder) if set_aside else named_by(folder.path)
        assert found is not None and found[0].name == "step-00000002.pt"
        assert [record.levelno for record in said.records] == [logging.WARNING] * 2
        assert "step-00000004.pt is damaged: its end is missing" in said.text
        assert "step-00000003.pt is damaged: its content does not match its SHA-256" in said.text
        assert ("renamed to step-00000004.pt.damaged; the one before is used" in said.text) == set_aside
    suffixes = ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt.damaged", "step-00000004.pt.damaged"]
    assert names(folder) == suffixes
    said.clear()
    save(folder, 3, 4)
    found = newest(folder)
    assert found is not None and found[0].name == "step-00000004.pt" and not said.records


def test_no_whole_one_is_none(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-00000001.pt").touch()
    assert newest(CheckpointFolder(tmp_path, keep=1)) is None
    assert names(CheckpointFolder(tmp_path, keep=1)) == ["step-00000001.pt.damaged"]
    assert "it has only 0 bytes" in said.text


def test_a_folder_that_is_a_file_costs_one_checkpoint(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    folder.path.write_text("in the way")
    save(folder, 1)
    assert "step-00000001.pt failed: File exists. Training continues; there is none yet." in said.text
    folder.path.unlink()
    save(folder, 2)
    shutil.rmtree(folder.path)  # somebody tidies up
    save(folder, 3)
    assert names(folder) == ["step-00000003.pt"] and len(said.records) == 1


def test_a_read_only_folder_costs_one_checkpoint(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)

    def read_only(path: Path, mode: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", read_only, raising=False)
        save(folder, 2)
    assert "failed: Read-only file system. Training continues; the last good one is" in said.text
    assert folder.last_good == tmp_path / "step-00000001.pt"
    save(folder, 3)
    assert folder.last_good == tmp_path / "step-00000003.pt"


def test_metrics_that_cannot_be_synced_cost_one_checkpoint(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """Else it would go on from metrics that are not there."""
    folder = CheckpointFolder(tmp_path, keep=2)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder.save(1, state(1), first=fail)
    folder.writer.wait()
    assert names(folder) == [] and "failed: Input/output error" in said.text


def test_it_writes_in_the_background(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    assert not folder.writer.is_busy()
    folder.writer.wait()
    go_on = threading.Event()
    folder.save(1, state(1), first=lambda: go_on.wait(20) and None)
    assert folder.writer.is_busy() and names(folder) == []
    go_on.set()
    folder.writer.wait()
    assert not folder.writer.is_busy() and names(folder) == ["step-00000001.pt"]


# --resume PATH


def test_beginning_with_a_file_a_run_dir_or_its_checkpoints(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", keep=3)
    save(folder, 1, 2, 3)
    one, two, three = (folder.path / f"step-0000000{step}.pt" for step in (1, 2, 3))
    assert named_by(one) == (one, checkpoint_file.digest(one))
    assert named_by(tmp_path / "run") == named_by(folder.path) == (three, checkpoint_file.digest(three))
    os.truncate(three, 100)
    assert named_by(tmp_path / "run")[0] == two
    assert three.exists()  # another run's folder is not changed


def test_beginning_with_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file"):
        named_by(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="it has no undamaged checkpoint"):
        named_by(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="it has no undamaged checkpoint"):
        named_by(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)step-00000001\.pt:.*it is damaged: it has only 13 bytes"):
        named_by(tmp_path / "checkpoints" / "step-00000001.pt")


def test_a_folder_in_the_place_of_a_checkpoint_is_told_as_an_error(tmp_path: Path) -> None:
    """Not as a traceback: what can't be read is the file system's business, and the user's."""
    (tmp_path / "step-00000001.pt").mkdir()
    with pytest.raises(CheckpointError):
        named_by(tmp_path)
