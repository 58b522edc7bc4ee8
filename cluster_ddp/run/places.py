"""Where run directories are, and what they are called.

runs/fit-20261126-204432-7f3a9c/    of a job, or of a whole array
runs/fit-20261126-204432-7f3a9c/3/  of an array's task
runs/fit-12                         a link to it, by the job's id
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TypeVar

from cluster_ddp.run.names import ASIDE, File

_NAMED = re.compile(r"(.+)-\d{8}-\d{6}-[0-9a-f]{6}")

AnyPath = TypeVar("AnyPath", bound=PurePath)


def new_name(name: str) -> str:
    """Return the name of a new run directory for a job of this name."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def name_in(folder: Path) -> str | None:
    """Return the job's name, by that of its run directory; None if no submission has named that."""
    named = _NAMED.fullmatch(named_by_us(folder).name)
    return named[1] if named else None


def named_by_us(folder: AnyPath) -> AnyPath:
    """Return the run directory that a submission has named: that of the whole array, if it is that of a task."""
    return folder.parent if folder.name.isdecimal() and _NAMED.fullmatch(folder.parent.name) else folder


def title(folder: PurePath) -> str:
    """Return the name of a run directory; of an array's task, after that of the whole: fit-20261126-204432-7f3a9c/3."""
    return str(folder.relative_to(named_by_us(folder).parent))


def whole_array(folder: Path, array_task: object) -> Path:
    """Return the directory of a whole array, by that of one of its tasks; `folder` itself if it was renamed."""
    folder = folder.resolve()  # it may be ".", or a link
    return folder.parent if folder.name == str(array_task) else folder


def each(runs_dir: Path) -> Iterator[Path]:
    """Yield the folders that may be run directories: those in a folder, each followed by its `tasks`."""
    with contextlib.suppress(OSError):
        for one in os.scandir(runs_dir):
            if one.is_dir(follow_symlinks=False):
                yield runs_dir / one.name
                yield from tasks(runs_dir / one.name)


def tasks(whole: Path) -> list[Path]:
    """Return the run directories of an array's tasks, by that of the whole, in the order of their numbers."""
    with contextlib.suppress(OSError):
        numbers = [int(one.name) for one in os.scandir(whole) if one.name.isdecimal()]
        return [whole / str(number) for number in sorted(numbers) if (whole / str(number) / File.SPEC).exists()]
    return []


def of_earlier(runs_dir: Path, label: str) -> list[Path]:
    """Return the run directories in which an earlier job ran, that was resumed since."""
    return [path for path in each(runs_dir) if (path / ASIDE.format(label)).is_dir()]


def link_of(folder: Path, job: str) -> Path | None:
    """Return where the link NAME-ID to a run directory is; None if no submission has named that.

    An array has one for all its tasks: of 12_3, it is NAME-12/3.
    """
    name, (array, _, task) = name_in(folder), job.partition("_")
    return None if name is None else named_by_us(folder).with_name(f"{name}-{array}") / task


def link(folder: Path, job: str) -> Path | None:
    """Let NAME-ID lead to a run directory. Returns that link; None if there is none."""
    path = link_of(folder, job)
    return path if path is not None and point(path, folder) else None


def leads_to(link: Path, target: Path) -> bool:
    """Return whether a path leads to `target`."""
    return link.resolve() == target.resolve()


def point(link: Path, target: Path) -> bool:
    """Let a link point at `target`, beside or below it; an older link is replaced. Returns whether it does.

    A file or a folder with its name stays; it may not be to be written, either. That is no reason to fail.
    """
    temporary, to = link.with_name(f".{link.name}.{os.urandom(4).hex()}.tmp"), os.path.relpath(target, link.parent)
    try:
        with contextlib.suppress(FileExistsError):
            link.symlink_to(to)
            return True
        if leads_to(link, target):
            return True
        if not link.is_symlink():
            return False
        temporary.symlink_to(to)
        temporary.replace(link)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
