import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.run.files import atomic_write, make_dir, open_own, remove_leftovers
from cluster_ddp.run.names import Env


@pytest.fixture(params=[0o000, 0o022, 0o077], ids="umask {:03o}".format, autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """No mode may depend on it."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"tw")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """And nothing that only looks like it."""
    (tmp_path / "mine.tmp").touch()
    (tmp_path / ".mine.tmp").touch()
    for name in ("x", ".progress"):
        if (child := os.fork()) == 0:
            with atomic_write(tmp_path / name):
                os._exit(0)
        os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 4
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.tmp", ".mine.tmp"}


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    make_dir(tmp_path / "runs" / "run")
    os.close(open_own(tmp_path / "x", os.O_WRONLY | os.O_CREAT))
    with atomic_write(tmp_path / "y"):
        pass
    assert [mode(tmp_path / name) for name in ("runs/run", "x", "y")] == [0o700, 0o600, 0o600]
    with pytest.raises(FileExistsError):
        make_dir(tmp_path / "runs" / "run")


@pytest.mark.parametrize("by_variable", [True, False])
def test_shared_with_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    monkeypatch.setenv(Env.SHARE, "1" if by_variable else "0")
    shared = None if by_variable else True
    os.close(open_own(tmp_path / "x", os.O_WRONLY | os.O_CREAT, shared=False))
    os.close(open_own(tmp_path / "x", os.O_RDONLY, shared=shared))
    assert mode(tmp_path / "x") == 0o600
    os.close(open_own(tmp_path / "x", os.O_WRONLY | os.O_CREAT, shared=shared))
    with atomic_write(tmp_path / "y", shared=shared):
        pass
    assert [mode(tmp_path / name) for name in ("x", "y")] == [0o640, 0o640]
    tmp_path.chmod(0o2700)  # a project's folder: what is made in it belongs to the project's group
    make_dir(tmp_path / "run", shared=shared)
    assert mode(tmp_path / "run") == 0o2750


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x").symlink_to("precious")
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match="It is a symbolic link"):
            open_own(tmp_path / "x", flags)
    assert (tmp_path / "precious").read_text() == "mine"
