"""agent.rank_notes: what a rank leaves for its supervisor."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.rank_notes import FailureNote, Notes


def env_of(folder: Path) -> dict[str, str]:
    return {"CLUSTER_DDP_NOTES": str(folder)}


def test_a_rank_leaves_why_it_failed_and_its_first_word_counts(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    rank_notes.failed(env_of(folder), 2, FailureNote("ValueError: two\nlines \x1b[31m"))
    rank_notes.failed(env_of(folder), 2, FailureNote("RuntimeError: later"))
    rank_notes.failed(env_of(folder), 0, FailureNote("stopped: rank 2 failed", "peer", 120, 16))
    read = Notes(folder)
    assert read.failure(2) == FailureNote("ValueError: two lines ?[31m")
    assert read.failure(0) == FailureNote("stopped: rank 2 failed", "peer", 120, 16)
    assert read.failure(1) is None
    assert (folder / "failed-2").stat().st_mode & 0o777 == 0o600


def test_it_says_that_it_was_stopped_or_has_joined(tmp_path: Path) -> None:
    read = Notes(tmp_path)
    assert not (read.is_stopped(11) or read.has_joined(3) or Notes(tmp_path / "missing").has_joined(3))
    rank_notes.stopped(env_of(tmp_path), 11)
    rank_notes.joined(env_of(tmp_path), "3")
    assert (read.is_stopped(11), read.is_stopped(1)) == (True, False)
    assert (read.has_joined(3), read.has_joined(11)) == (True, False)


def test_what_cannot_be_written_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rank_notes.failed({}, 0, FailureNote("x"))
    rank_notes.stopped({"CLUSTER_DDP_NOTES": ""}, 0)
    rank_notes.joined(env_of(tmp_path / "missing"), 0)
    assert (capfd.readouterr(), list(tmp_path.iterdir())) == (("", ""), [])


def test_no_link_is_followed(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "notes"
    folder.mkdir()
    secret.write_text('{"words": "secret", "kind": ""}')
    (folder / "failed-0").symlink_to(secret)
    (folder / "failed-1").symlink_to(tmp_path / "new")
    rank_notes.failed(env_of(folder), 1, FailureNote("x"))
    assert Notes(folder).failure(0) is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"words": "x"}', "[" * 60_000, '{"words": "' + "x" * 70_000 + '", "kind": ""}'],
    ids=lambda content: content[:20],
)
def test_a_damaged_note_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "failed-0").write_text(content)
    assert Notes(tmp_path).failure(0) is None


def test_a_step_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    """Others may read the number, and compare it."""
    (tmp_path / "failed-0").write_text('{"words": "x", "kind": "", "step": "3", "micro_batch": 1.5}')
    assert Notes(tmp_path).failure(0) == FailureNote("x")


@pytest.mark.parametrize("has_memory", [True, False])
def test_the_folder_is_its_owners_and_in_memory_if_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    in_memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    temporary.mkdir()
    if has_memory:
        in_memory.mkdir()
    monkeypatch.setattr(rank_notes, "_IN_MEMORY", in_memory)
    monkeypatch.setenv("TMPDIR", str(temporary))
    with rank_notes.folder() as one, rank_notes.folder() as other:
        assert one != other
        for folder in (one, other):
            assert folder.parent == (in_memory if has_memory else temporary)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (folder / "failed-1").touch()
    assert not one.exists() and not other.exists()


def test_no_name_service_is_asked_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task makes one: thousands would ask at the same time, and it may not answer."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rank_notes, "_IN_MEMORY", tmp_path)
    asked: list[object] = []
    monkeypatch.setattr(pwd, "getpwuid", asked.append)
    monkeypatch.setattr(grp, "getgrgid", asked.append)
    with rank_notes.folder() as folder:
        assert folder.parent == tmp_path
    assert asked == []


@pytest.mark.parametrize("mode", [0o722, 0o702])
def test_a_folder_that_others_may_write_is_not_locked(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="others may have written it"):
        rank_notes.lock(tmp_path)


def test_without_any_place_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full must not end a training."""
    monkeypatch.setattr(rank_notes, "_IN_MEMORY", tmp_path / "none")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with rank_notes.folder() as folder:
        rank_notes.failed({"CLUSTER_DDP_NOTES": str(folder)}, 1, FailureNote("ValueError: x"))
        assert Notes(folder).failure(1) is None and not Notes(folder).is_stopped(1)


HOLDER = """import time
from cluster_ddp.agent import rank_notes
with rank_notes.folder() as folder:
    (folder / "failed-1").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of one which runs, a new one, or what somebody else has named so."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rank_notes, "_IN_MEMORY", tmp_path)
    code = HOLDER.replace("with", f"rank_notes._IN_MEMORY = rank_notes.Path({str(tmp_path)!r})\nwith", 1)
    holders = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None]
    try:
        holders[0].kill()
        holders[0].wait()
        with rank_notes.folder() as new:
            assert folders[0].exists()
        for folder in folders:
            os.utime(folder, (0, 0))
        (foreign := tmp_path / "ddp-20240101").mkdir()
        (tmp_path / f"{new.name}x").symlink_to(foreign)
        (foreign / "kept").touch()
        os.utime(foreign, (0, 0))
        with rank_notes.folder():
            assert [folder.exists() for folder in folders] == [False, True]
            assert (folders[1] / "failed-1").exists() and (foreign / "kept").exists()
    finally:
        holders[1].kill()
        holders[1].wait()
