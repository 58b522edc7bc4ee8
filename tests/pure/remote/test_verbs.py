"""--on HOST, as far as no machine is needed; tests/slurm/test_remote.py has a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cluster_ddp.cli import fetch, status
from cluster_ddp.cli.submit import main as submit
from cluster_ddp.errors import RemoteError
from cluster_ddp.remote import project, remote_verbs
from cluster_ddp.remote.host import Host, connect


@pytest.mark.parametrize(
    ("words", "where", "rest"),
    [
        (["--nodes", "2", "--", "x", "--on", "y"], None, ["--nodes", "2", "--", "x", "--on", "y"]),
        (["--on", "host", "--", "x"], "host", ["--", "x"]),
        (["--nodes", "2", "--on=me@host:a b", "--", "x"], "me@host:a b", ["--nodes", "2", "--", "x"]),
        (["12", "--on", "host"], "host", ["12"]),
    ],
)
def test_the_option_is_taken_from_before_the_dashes(words: list[str], where: str | None, rest: list[str]) -> None:
    assert remote_verbs.split(words) == (where, rest)


@pytest.mark.parametrize("words", [["--on"], ["--on", "--", "x"], ["--on", "--nodes", "2"]])
def test_it_needs_a_machine(words: list[str]) -> None:
    with pytest.raises(RemoteError, match="it names no machine"):
        remote_verbs.split(words)


def test_a_machine_is_no_option_of_ssh() -> None:
    """--on=-oProxyCommand=… would run a command here."""
    with pytest.raises(RemoteError, match="is not the name of a machine"), connect("-oProxyCommand=touch x"):
        pass


def test_there_must_be_an_ssh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    on = ["--on", "x"]
    for verb, words in ((submit, [*on, "--", "true"]), (status.main, on), (fetch.main, [*on, "12"])):
        with pytest.raises(SystemExit, match="2"):
            verb(words)
        assert "Connecting to x:\n  there is no ssh on this machine.\n" in capsys.readouterr().err


def test_fetching_needs_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        fetch.main(["12"])
    assert capsys.readouterr().err == (
        "cluster-ddp fetch: error: Fetching run directories:\n  --on must say from which machine.\n"
        "  Hint: cluster-ddp fetch --on HOST 12\n"
    )


def test_the_folder_here_must_be_a_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/")
    with pytest.raises(RemoteError) as error:
        project.find(Host(name="x", options=()), "")
    assert error.value.asked == f"Finding the copy of {tmp_path} on x:"
    assert error.value.found.startswith("fatal: not a git repository")
    assert error.value.hint == "go to the project that you submit from; it must be a git checkout: git init"


@pytest.mark.parametrize(
    ("folder", "found"), [("", "cluster_ddp/it's mine"), ("~/other", "other"), ("/scratch/me", "/scratch/me")]
)
def test_where_the_copy_is(folder: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "it's mine"
    (root / "sub dir").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root / "sub dir")
    there = project.find(Host(name="x", options=()), folder)
    assert (there.folder, str(there.subfolder)) == (found, "sub dir")
    assert there.origin.endswith(f":{root}")


def test_fetching_names_a_project_from_which_nothing_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, ssh = tmp_path / "it's mine", tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$1" != -G ] || { echo "controlpath x"; exit; }\nshift 2\nexec sh -c "$1"\n')  # here
    ssh.chmod(0o755)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    with pytest.raises(SystemExit, match="2"):
        fetch.main(["--on", "x", "12"])
    assert f"nothing was submitted to it from {root}.\n  Hint: cluster-ddp submit --on x:" in capsys.readouterr().err


def test_rsyncs_own_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rsync").write_text("#!/bin/sh\necho 'disk quota exceeded' >&2\nexit 11\n")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RemoteError, match="rsync ended with status 11: disk quota exceeded"):
        Host(name="host", options=()).rsync((), tmp_path, "there")
