"""Takes a run directory away from an older start of the job, whose processes may live on where nobody can end them.

A node that is cut from the network may still reach the shared file system: its ranks hold the lock and open files, and
write. So a file, `.start`, names the start that the run directory belongs to, and an older one is refused.

    take_over   writes .start; removes the lock file; gives files that are written in place a new inode, with the
                content of the old one; removes what is half written under a temporary name
    a rank      opens a file (or a temporary one), then reads .start (`refuse_older`), then writes (or renames)

So nothing that is written after `take_over` counts, whenever the rank was held up: what it opened before is an orphan,
its temporary files are gone, and what it opens later comes after .start.

On NFS the same order holds between two clients. Opening the folder asks the server whether it has changed (nfs(5),
close-to-open), so a new .start is seen at once, unless the file system is mounted with `nocto`, or no descriptor is
free: then it is seen after 60 s at most (acdirmax). A file that another client has removed or replaced can no longer be
written to (ESTALE); what the cut node has in its page cache of it is lost.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster_ddp.errors import RunDirError
from cluster_ddp.run.files import atomic_write, read_regular, refresh, remove_leftovers, with_reserve
from cluster_ddp.run.names import File

_IN_PLACE = (File.METRICS, File.STARTS, File.SICK_NODES, File.USAGE.format("*"), File.STACK.format("*"))
_WITH_TEMPORARY_FILES = (File.CHECKPOINTS, f"{File.CHECKPOINTS}/*", File.TRACKERS)  # and the run directory itself
_BYTES = 4096
_BLOCK_BYTES = 1 << 20


def take_over(run_dir: Path, job: str, start: int, *, logs: Iterable[Path] = ()) -> None:
    """Give the run directory to a start of the job. Call it before each step that starts ranks.

    A restart in the step that runs does not need it: its agents have ended all ranks of the start before.

    A run directory that another job has locked last stays as it is, but for `.start` and the logs.

    Args:
        run_dir: the run directory.
        job: the job's label: 12, or 12_3 for an array task.
        start: number of starts of its ranks before this one.
        logs: logs of tasks that may still be written to by lost nodes.

    Raises:
        OSError: a file can't be written, such as on a full disk. What an older start writes may count then.
    """
    with atomic_write(run_dir / File.START, shared=False) as file:
        file.write(json.dumps({"job": job, "start": start}).encode() + b"\n")
    if _is_of(run_dir / File.LOCK, job):
        (run_dir / File.LOCK).unlink(missing_ok=True)
        for folder in (run_dir, *_matching(run_dir, _WITH_TEMPORARY_FILES)):
            remove_leftovers(folder)
        for path in _matching(run_dir, _IN_PLACE):
            _renew(path)
    for path in logs:
        _renew(path)


def _matching(run_dir: Path, patterns: Iterable[str]) -> Iterator[Path]:
    return (path for pattern in patterns for path in run_dir.glob(pattern))


def refuse_older(run_dir: Path, job: str, start: int) -> None:
    """Refuse a write of a rank if the run directory belongs to a newer start of its job.

    Args:
        run_dir: the run directory.
        job, start: those of the rank, as in `take_over`.

    Raises:
        RunDirError: a newer start has taken it.
        OSError: the run directory can't be read.
    """
    newest = _newest(run_dir, job)
    if newest > start:
        found = f"a newer start of this job has taken the run directory: start {newest}. "
        hint = "nothing is to be done for this rank; the newer start resumes from the newest checkpoint"
        raise RunDirError(
            f"Writing to the run directory {run_dir}:", f"{found}This rank is of start {start}: it ends.", hint
        )


def _newest(run_dir: Path, job: str) -> int:
    """The start of this job that the run directory belongs to; 0 if nothing says it.

    It needs no descriptor, unless that has changed: a training also saves where connections have taken all.
    """
    path = run_dir / File.START
    try:
        refresh(run_dir)  # see above
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOENT):
            raise
    try:
        seen = path.lstat()
        return _read(path, job, (seen.st_ino, seen.st_mtime_ns))
    except FileNotFoundError:
        return 0


@functools.lru_cache(maxsize=1)
def _read(path: Path, job: str, version: tuple[int, int]) -> int:
    try:
        found = json.loads(with_reserve(lambda: read_regular(path, _BYTES)))
        return int(found["start"]) if found["job"] == job else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0


def _is_of(lock: Path, job: str) -> bool:
    """Whether a lock file is of this job, or missing."""
    try:
        return bool(json.loads(read_regular(lock, _BYTES))["job"] == job)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _renew(path: Path) -> None:
    """Put a copy in the place of a file, if it is a regular one: what was opened before is then no part of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return
        raise
    with open(descriptor, "rb") as old:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            return
        with atomic_write(path, shared=False) as new:
            left = seen.st_size  # it may grow
            while left and (block := old.read(min(left, _BLOCK_BYTES))):
                new.write(block)
                left -= len(block)
            with contextlib.suppress(OSError):  # some file systems have one mode for all files
                os.fchmod(new.fileno(), stat.S_IMODE(seen.st_mode))
