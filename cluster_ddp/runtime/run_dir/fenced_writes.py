"""One run at a time in a run directory: writes that a newer start of the job refuses, and a lock that other jobs see.

All of `runtime` writes with these functions. A file is opened first and checked then: see `run.fence` for
why this order leaves no gap. A run directory that was replaced is refused, too: where others may rename it, its path
could lead to another folder of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cluster_ddp.errors import RunDirError
from cluster_ddp.run import fence, files, ownership
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import CLUSTER_NAME, Variables, node_name

log = logging.getLogger("cluster_ddp")

LOCK_PATIENCE_S = 240.0
"""Seconds that a restarted job waits for its former run to end."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Held(NamedTuple):
    path: Path
    descriptor: int
    seen: os.stat_result


_held: _Held | None = None  # the run directory of this process
_holding = threading.RLock()  # several threads write


def hold(path: Path) -> None:
    """From now on, `check` refuses to write if `path` leads elsewhere; a path of an earlier call no longer counts.

    Raises:
        OSError: it can't be opened.
    """
    global _held
    with _holding:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if _held is not None:
            os.close(_held.descriptor)
        _held = _Held(path, descriptor, os.fstat(descriptor))


def check() -> None:
    """Check that no newer start of the job has taken the run directory, and that its path still leads to it.

    Raises:
        RunDirError: one has; or another folder or a link is in its place.
        OSError: the run directory can't be read.
    """
    run_dir, start = os.environ.get(Env.RUN_DIR), os.environ.get(Env.START)
    if run_dir and start:
        fence.refuse_older(Path(run_dir), Variables(os.environ).job_label(), int(start))
    with _holding:
        if _held is not None:
            _refuse_other(_held.path, _held)


def _refuse_other(path: Path, held: _Held) -> None:
    try:
        here = path.stat()
    except FileNotFoundError:
        return  # removed: who writes next makes it again
    if os.path.samestat(here, held.seen):
        return
    if _is_removed(held.descriptor) and not ownership.others(path.lstat()):
        hold(path)  # made again
        return
    found = "it is not the folder any more that this run began in: it was moved, or replaced by another one or a link."
    hint = f"see who may rename it: ls -ld {shlex.quote(str(path.parent))} {shlex.quote(str(path))}"
    raise RunDirError(f"Writing to the run directory {path}:", f"{found} This run ends.", hint)


def _is_removed(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_nlink == 0
    except OSError as error:  # of NFS
        return error.errno == errno.ESTALE


def open_own(path: Path, flags: int, *, shared: bool | None = None) -> int:
    """Open a file for writing; see `files.open_own`.

    Raises:
        RunDirError, OSError: as `check`, or it can't be opened.
    """
    check()  # so that no empty file is made
    descriptor = files.open_own(path, flags & ~os.O_TRUNC, shared=shared)
    try:
        check()
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def append(path: Path, line: bytes) -> None:
    """Append a line to a file, which is made if it is missing. The errors are those of `open_own`."""
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
        file.write(line)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all; see `files.atomic_write`.

    Raises:
        RunDirError, OSError: as `check`, or it can't be written.
    """
    with files.atomic_write(path) as file:
        yield file
        check()


class RunLock:
    """A lock on a run directory. The process holds it until it ends, in whatever way. Its file names the owner.

    It is a POSIX lock (fcntl(2)). NFS, and Lustre mounted with flock, keep it across nodes. If the file system has no
    locks, that is logged, and the run continues without one.

    Raises:
        RunDirError: another job holds the lock, a newer start of this job has the run directory, or the former run of
            this job does not end.
        OSError: the file can't be written.
    """

    def __init__(self, path: Path, topology: Topology) -> None:
        self._path, self._topology = path, topology
        self._file = self._open()
        deadline, told = time.monotonic() + LOCK_PATIENCE_S, False
        while not self._locked():
            owner = self._owner()
            same_job = topology.job_id is not None and owner.get("job") == topology.job_label
            if not same_job or time.monotonic() > deadline:
                os.close(self._file)
                raise _in_use(path, owner, same_job)
            if not told:
                told = True
                log.warning("Waiting for the former run of this job to end: %s.", _who(owner))
            time.sleep(0.5)
        self._sign()

    def keep(self) -> None:
        """Check that other runs find this lock. If its file was removed or replaced, lock the new one.

        Raises:
            RunDirError: another job has taken it, or a newer start of this one.
            OSError: the file can't be written.
        """
        check()
        if files.is_at(self._file, self._path):
            return
        log.warning("%s was removed or replaced while this run held it; it is locked again.", self._path)
        os.close(self._file)
        self._file = self._open()
        if not self._locked():
            raise RunDirError(
                f"Writing to the run directory {self._path.parent}:",
                f"{self._path.name} was removed or replaced, and {_who(self._owner())} is using the run directory now. "
                "This run ends: two at the same time would damage each other's files.",
                "to run both, give each its own run directory: --run-dir PATH",
            )
        self._sign()

    def _open(self) -> int:
        """Open the lock file, readable by its owner only: who may read it could lock it."""
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT, shared=False)
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            with contextlib.suppress(OSError):  # some file systems have one mode for all files
                os.fchmod(descriptor, 0o600)
        return descriptor  # closing any descriptor of the file would release the lock

    def _sign(self) -> None:
        owner: dict[str, object] = {
            "job": self._topology.job_label,
            "is_local": self._topology.is_local,
            "host": node_name(os.environ),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        if cluster := Variables(os.environ).text(*CLUSTER_NAME):
            owner["cluster"] = cluster
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(owner).encode() + b"\n", 0)

    def _locked(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                words = "The file system of %s has no locks: two runs at the same time would not be noticed."
                log.warning(words, self._path)
                return True
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def _owner(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            owner = files.parse(os.pread(self._file, 4096, 0))
            if isinstance(owner, dict):
                return owner
        return {}


def _who(owner: dict[str, object]) -> str:
    job = f"job {owner['job']}" if owner.get("job") else "a run"
    return f"{job} (process {owner.get('process', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')})"


def _in_use(lock: Path, owner: dict[str, object], same_job: bool) -> RunDirError:
    asked = f"Using the run directory {lock.parent}:"
    if same_job:
        found = f"{_who(owner)}, the former run of this job, is still using it after {LOCK_PATIENCE_S:g} s."
        return RunDirError(asked, found, f"if its node is gone for good: rm {shlex.quote(str(lock))}")
    how = f" ({'kill' if owner.get('is_local') else 'scancel'} {owner['job']})" if owner.get("job") else ""
    hint = f"give this run its own run directory (--run-dir PATH), or end it first{how}"
    return RunDirError(asked, f"{_who(owner)} is using it.", hint)
