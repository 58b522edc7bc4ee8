"""--stage-env on a node: what is unpacked, used and removed; and what others on the node can't make of it."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import io
import os
import pickle
import pwd
import re
import signal
import subprocess
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from strangers import STRANGER, USER, as_stranger, folder_of_all, needs_a_stranger

from cluster_ddp.agent import rank_notes
from cluster_ddp.agent.task import staged_env
from cluster_ddp.agent.task.staged_env import Staged
from cluster_ddp.run.names import Env

NAME = "cluster_ddp-env-7-kNoWnOnLy0"


@dataclass
class Node:
    """A disk, and an environment whose Python says where it is."""

    disk: Path
    venv: Path
    archive: Path
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.env = {
            **{"SLURM_TMPDIR": str(self.disk), "SLURM_NODEID": "1", "SLURMD_NODENAME": "node2"},
            **{"PATH": f"{self.venv}/bin:/usr/bin:/bin", Env.COPY: NAME},
        }

    @property
    def copy(self) -> Path:
        return self.disk / f"{NAME}-1"

    def unpack(self) -> str:
        """What it says; nothing if it has unpacked the environment."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            done = staged_env.unpack(self.archive, NAME, str(self.venv), self.env)
        assert done == (not said.getvalue())
        return said.getvalue()

    def use(self, *command: str) -> Staged:
        return staged_env.use(str(self.venv), command or ("python",), self.env)

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.disk.iterdir())


def output(staged: Staged) -> str:
    """What the task says: the path of its Python."""
    return subprocess.run(staged.command, env=staged.env, capture_output=True, text=True, check=True).stdout.strip()


def make_node(folder: Path, disk: Path) -> Node:
    venv = folder / "it's an env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text('#!/bin/sh\necho "$0"\n')
    (venv / "bin" / "python").chmod(0o755)
    (venv / "bin" / "python3").symlink_to("python")
    with tarfile.open(folder / "env.tar", "w") as tar:
        tar.add(venv / "bin", arcname="bin")
    return Node(disk, venv, folder / "env.tar")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "my disk").mkdir()
    return make_node(tmp_path, tmp_path / "my disk")


def test_a_copy_is_made_used_and_removed(node: Node) -> None:
    assert node.unpack() == ""
    assert node.entries() == [node.copy.name]
    assert node.copy.stat().st_mode & 0o777 == 0o700
    assert (node.copy / "bin" / "python3").readlink() == Path("python")
    staged = node.use("python", "a b")
    assert staged.command == ["python", "a b"]
    assert staged.env["VIRTUAL_ENV"] == str(node.copy) == str(staged.copy)
    assert output(staged) == f"{node.copy}/bin/python"
    staged_env.remove(staged)
    assert node.entries() == []


def test_the_commands_interpreter_is_that_of_the_copy(node: Node) -> None:
    node.unpack()
    staged = node.use(f"{node.venv}/bin/python3", f"{node.venv}/x.py")
    assert staged.command == [f"{node.copy}/bin/python3", f"{node.venv}/x.py"]
    for other in ("/usr/bin/python", f"{node.venv}-2/bin/python", "python"):
        assert node.use(other).command == [other]


def test_names_cannot_be_known() -> None:
    names = {staged_env.new_name("12_3") for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"cluster_ddp-env-12_3-[0-9a-f]{16}", name) for name in names)


def test_the_last_task_of_the_node_removes_it(node: Node) -> None:
    node.unpack()
    first, second = node.use(), node.use()
    staged_env.remove(first)
    assert output(second) == f"{node.copy}/bin/python"
    staged_env.remove(second)
    assert node.entries() == []
    staged_env.remove(Staged(["true"], {}))  # of a task without a copy: nothing happens


def test_a_task_that_ends_before_another_begins_leaves_it_the_copy(node: Node) -> None:
    node.unpack()

    def begin(rank: str) -> Staged:
        return staged_env.use(str(node.venv), ("python",), {**node.env, "RANK": rank}, tasks=2)

    staged_env.remove(begin("2"))
    staged_env.remove(begin("2"))  # it was started again
    assert node.entries() == [node.copy.name]
    slower = begin("3")
    assert slower.copy == node.copy
    staged_env.remove(slower)
    assert node.entries() == []


def test_what_the_command_has_started_keeps_the_copy(node: Node) -> None:
    """A supervisor may be killed before the rank has ended."""
    node.unpack()
    staged = node.use()
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], staged.env)
    try:
        staged_env.remove(staged)
        assert node.entries() == [node.copy.name]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    rank_notes.remove_unused(node.copy)
    assert node.entries() == []


def test_no_copy_that_is_being_removed_is_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.unpack()
    remover = os.open(node.copy, os.O_RDONLY)
    fcntl.flock(remover, fcntl.LOCK_EX)
    assert node.use().copy is None
    os.close(remover)

    def late(descriptor: int, how: int) -> None:  # before it was locked, it was removed, and something else came
        node.copy.rename(node.disk / "removed")
        node.venv.rename(node.copy)

    monkeypatch.setattr("fcntl.flock", late)
    assert node.use().copy is None


def test_without_a_copy_the_environment_is_used_where_it_is(node: Node) -> None:
    as_it_is = Staged(["python", "-V"], node.env)
    assert node.use("python", "-V") == as_it_is
    node.unpack()
    (node.copy / "bin" / "python").chmod(0o644)  # or its interpreter is not on this node
    assert node.use("python", "-V") == as_it_is
    node.disk.rename(node.disk.parent / "other")
    assert node.use("python", "-V") == as_it_is
    del node.env[Env.COPY]
    assert node.use("python", "-V") == Staged(["python", "-V"], node.env)


@pytest.mark.parametrize("how", ["missing disk", "a file", "a circle", "no archive", "damaged", "taken", "no tar"])
def test_a_node_that_cannot_unpack_says_why_and_leaves_nothing(node: Node, how: str) -> None:
    expected = {"no archive": f"{node.archive}: No such file", "taken": "exists", "no tar": "tar: No such file"}
    if how in ("missing disk", "a file", "a circle"):
        node.disk.rmdir()
        expected[how] = {"missing disk": "No such file", "a file": "Not a directory", "a circle": "Too many levels"}[
            how
        ]
    if how == "a file":
        node.disk.touch()
    elif how == "a circle":
        node.disk.symlink_to(node.disk)
    elif how == "no archive":
        node.archive.unlink()
    elif how == "damaged":
        node.archive.write_bytes(node.archive.read_bytes()[:700])
        expected[how] = f"is the disk of {node.disk} full?"
    elif how == "taken":
        (node.copy / "x").mkdir(parents=True)
        expected[how] = "Directory not empty"
    elif how == "no tar":
        node.env["PATH"] = "/nowhere"
    said = node.unpack()
    assert said.startswith("warning: Node node2 could not unpack the environment (") and said.count("\n") == 1
    assert said.endswith(f"). Its ranks import from {node.venv}.\n")
    assert expected[how] in said
    assert not node.disk.is_dir() or node.entries() == ([node.copy.name] if how == "taken" else [])
    assert node.use().copy is None


def test_a_copy_appears_whole_or_not_at_all(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while it is unpacked; and an end by a signal's exception leaves nothing."""
    seen = []

    def tar(*_: object, **__: object) -> None:
        seen.extend(node.entries())
        (node.disk / seen[0] / "bin").mkdir()
        raise SystemExit(143)

    monkeypatch.setattr("subprocess.run", tar)
    with pytest.raises(SystemExit):
        node.unpack()
    assert seen == [f"{node.copy.name}.part"]
    assert node.entries() == []


def test_what_killed_jobs_have_left_is_removed_after_an_hour(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    ages = {"old": 3700, "old-0.part": 3700, "used": 3700, "linked": 3700, "new": 3500}
    for name, age in ages.items():
        folder = node.disk / f"cluster_ddp-env-{name}" if name != "linked" else node.disk / "mine"
        (folder / "lib").mkdir(parents=True)
        os.utime(folder, (now - age, now - age))
    (node.disk / "another folder").mkdir()
    os.utime(node.disk / "another folder", (0, 0))
    link = node.disk / "cluster_ddp-env-linked"
    link.symlink_to("mine")
    os.utime(link, (0, 0), follow_symlinks=False)
    used = rank_notes.lock(node.disk / "cluster_ddp-env-used", fcntl.LOCK_SH)
    os.utime(node.venv, (0, 0))
    with tarfile.open(node.archive, "w") as tar:
        tar.add(node.venv, arcname=".")  # the copy gets its time
    assert node.unpack() == ""
    os.close(used)
    kept = {"another folder", "mine", *(f"cluster_ddp-env-{name}" for name in ("linked", "new", "used"))}
    assert set(node.entries()) == {node.copy.name, *kept}
    assert (node.disk / "mine" / "lib").exists()
    assert now - node.copy.stat().st_mtime < 60


def test_nothing_is_removed_while_it_is_unpacked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if that takes hours."""
    run = subprocess.run

    def tar(*words: Any, **options: Any) -> Any:
        part = node.disk / f"{node.copy.name}.part"
        os.utime(part, (0, 0))
        rank_notes.remove_leftovers(node.disk, prefix=staged_env.PREFIX, new_s=staged_env.LEFT_AFTER_S)
        return run(*words, **options)

    with monkeypatch.context() as patch:
        patch.setattr("subprocess.run", tar)
        assert node.unpack() == ""
    assert output(node.use()) == f"{node.copy}/bin/python"


@pytest.mark.parametrize(
    ("mode", "group", "members", "may"),
    [
        (0o775, "ann", [], True),  # the user's private group, with umask 002
        (0o775, "ann", ["ann"], True),
        (0o775, "ann", ["bob"], False),
        (0o775, "users", [], False),
        (0o777, "ann", [], False),
        (0o1777, "users", [], True),
    ],
)
def test_a_private_group_has_nobody_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, mode: int, group: str, members: list[str], may: bool
) -> None:
    node.disk.chmod(mode)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann"))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    assert ("others may replace what is in" not in node.unpack()) == may


def test_an_archive_or_a_copy_that_others_can_write_is_not_used(node: Node) -> None:
    node.archive.chmod(0o646)
    assert f"{node.archive} is not a file of yours that only you can write" in node.unpack()
    node.archive.chmod(0o600)
    assert node.unpack() == ""
    node.copy.chmod(0o777)
    assert node.use().copy is None


def test_a_link_to_an_archive_is_not_followed(node: Node) -> None:
    """Even one to a file of ours: who made the link chooses which."""
    node.archive.rename(node.archive.with_name("mine.tar"))
    node.archive.symlink_to("mine.tar")
    assert "env.tar is not a file of yours" in node.unpack()


@pytest.fixture
def shared() -> Iterator[Node]:
    """A node whose disk everybody can write, with an environment of USER's."""
    with folder_of_all() as disk, folder_of_all(0o755) as home:
        node = make_node(home, disk)
        for path in (home, *home.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
        yield node


def as_user(call: Callable[[], Any]) -> Any:
    """Call a function as USER, in a process of its own: root would withstand the attacks. Returns its result."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            os.chdir("/")
            result = ("returned", call())
        except BaseException:
            result = ("raised", traceback.format_exc())
        os.write(write, pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        how, result = pickle.load(file)
    os.waitpid(process, 0)
    assert how == "returned", result
    return result


def job(node: Node) -> tuple[str, str]:
    """Unpack, use and remove the environment. Returns what was said, and which Python the task has used."""
    said = node.unpack()
    staged = node.use()
    used = output(staged)
    staged_env.remove(staged)
    return said, used


@needs_a_stranger
@pytest.mark.parametrize("also_a_copy", [False, True])
@pytest.mark.parametrize("planting", [("ln", "-s"), ("cp", "-r")])
def test_what_a_stranger_has_put_under_the_copys_name_is_not_used(
    shared: Node, planting: tuple[str, ...], also_a_copy: bool
) -> None:
    """A stranger learns the name while the copy exists, and takes it when the disk is full and the copy removed."""
    assert as_stranger(*planting, shared.venv, shared.copy).returncode == 0
    if not also_a_copy:
        assert as_user(lambda: output(shared.use())) == f"{shared.venv}/bin/python"
        return
    said, used = as_user(lambda: job(shared))
    assert "could not unpack the environment (" in said
    assert used == f"{shared.venv}/bin/python"
    assert shared.entries() == [shared.copy.name]
    assert shared.venv.exists()


@needs_a_stranger
@pytest.mark.parametrize("how", ["a stranger's", "a link to a stranger's", "a named pipe"])
def test_an_archive_that_is_not_ours_is_not_unpacked(shared: Node, how: str) -> None:
    planted = shared.disk / "env.tar"
    assert as_stranger("cp", shared.archive, planted).returncode == 0
    if how == "a stranger's":
        shared.archive = planted
    elif how == "a named pipe":  # opening it would wait for ever
        shared.archive = shared.disk / "pipe"
        assert as_stranger("mkfifo", shared.archive).returncode == 0
    else:
        shared.archive.unlink()
        shared.archive.symlink_to(planted)
    said, used = as_user(lambda: job(shared))
    assert f"{shared.archive} is not a file of yours" in said
    assert used == f"{shared.venv}/bin/python"
    assert set(shared.entries()) <= {"env.tar", "pipe"}


@needs_a_stranger
@pytest.mark.parametrize("weak", ["mode", "owner", "parent"])
def test_nothing_is_unpacked_where_others_may_replace_it(shared: Node, weak: str) -> None:
    """A folder that others can write and that lacks the sticky bit; one of another user; one inside such a one."""
    outer = shared.venv.parent / "part"
    disk = outer / "disk"
    disk.mkdir(parents=True)
    for path in (outer, disk):
        os.chown(path, USER, USER)
    found = outer if weak == "parent" else disk
    if weak == "owner":
        os.chown(found, STRANGER, STRANGER)
        found.chmod(0o1777)
    else:
        found.chmod(0o777)
    shared.env["SLURM_TMPDIR"] = str(disk)
    said, used = as_user(lambda: job(shared))
    assert f"(others may replace what is in {found}; set SLURM_TMPDIR to a folder of yours)" in said
    assert used == f"{shared.venv}/bin/python"
    assert list(disk.iterdir()) == []


@needs_a_stranger
def test_a_strangers_link_to_the_disk_is_resolved_first(shared: Node) -> None:
    """It is then of no use to change the link: the path of the copy has none."""
    link = shared.disk / "link"
    inner = shared.venv.parent / "disk"
    inner.mkdir()
    os.chown(inner, USER, USER)
    assert as_stranger("ln", "-s", inner, link).returncode == 0
    shared.env["SLURM_TMPDIR"] = str(link)
    assert as_user(lambda: job(shared)) == ("", f"{inner}/{NAME}-1/bin/python")


@needs_a_stranger
def test_a_strangers_leftovers_are_left_alone(shared: Node) -> None:
    old = shared.disk / "cluster_ddp-env-3-0"
    assert as_stranger("mkdir", "-m", "777", old).returncode == 0
    os.utime(old, (0, 0))
    assert as_user(lambda: job(shared)) == ("", f"{shared.copy}/bin/python")
    assert shared.entries() == [old.name]
