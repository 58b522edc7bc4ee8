"""A copy of the code in the run directory, so that later edits don't reach a waiting job."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cluster_ddp.errors import RunDirError
from cluster_ddp.run.names import File
from cluster_ddp.waiting_notice import named_if_slow


def subfolder(folder: Path) -> str:
    """Return the path of the working folder in the copy, relative to the run directory: "code", or below it.

    Raises:
        RunDirError: the folder is not in a git checkout.
    """
    return str(Path(File.CODE) / folder.resolve().relative_to(root(folder)))


def root(folder: Path) -> Path:
    """Return the top of the git checkout that holds a folder.

    Raises:
        RunDirError: the folder is not in one.
    """
    return Path(_git(folder, "rev-parse", "--show-toplevel")[0].rstrip("\n"))


def files(root: Path) -> list[str]:
    """Return the files of a git checkout: tracked ones, and untracked ones that git does not ignore.

    The names are relative to `root`, its top. A tracked file may have been deleted.

    Raises:
        RunDirError: git fails.
    """
    return _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def take(folder: Path, run_dir: Path) -> None:
    """Copy the git checkout that holds `folder` to code/ in a run directory: tracked files, and untracked ones that git
    does not ignore.

    Ignored files and folders at the top of the checkout (data, environments, earlier runs) are linked, so that relative
    paths to them still hold.

    Raises:
        RunDirError: `folder` is not in a git checkout, or a file can't be copied.
    """
    top, copy = root(folder), run_dir / File.CODE
    try:
        copy.mkdir()
        for name in files(top):
            _copy(top / name, copy / name)
        for name in _git(top, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"):
            if name.strip("/").count("/") == 0 and not (copy / name.strip("/")).exists():
                (copy / name.strip("/")).symlink_to(top / name.strip("/"))
    except OSError as error:
        raise RunDirError(f"Copying {top} to {copy}:", str(error), "submit without --snapshot") from error


def _copy(source: Path, target: Path) -> None:
    if not source.is_symlink() and not source.exists():
        return  # deleted, but still tracked
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():  # a submodule, or a checkout inside this one
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _git(folder: Path, *arguments: str) -> list[str]:
    try:
        with named_if_slow(f"git {arguments[0]} to answer"):
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _error(folder, str(error)) from error
    if done.returncode != 0:
        raise _error(folder, os.fsdecode(done.stderr).strip())
    return [name for name in os.fsdecode(done.stdout).split("\0") if name]


def _error(folder: Path, found: str) -> RunDirError:
    hint = "make it a git checkout: git init; or leave out --snapshot"
    return RunDirError(f"Copying the code in {folder}:", found, hint)
