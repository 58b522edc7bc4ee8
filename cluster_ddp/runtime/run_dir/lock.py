"""One run at a time in a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import stat
import time
from pathlib import Path

from cluster_ddp import run_files
from cluster_ddp.errors import RunDirError
from cluster_ddp.files import is_at
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import CLUSTER_NAME, Variables, node_name

log = logging.getLogger("cluster_ddp")

PATIENCE_S = 240.0
"""Seconds that a restarted job waits for its former run to end."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


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
        deadline, told = time.monotonic() + PATIENCE_S, False
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
        fenced_writes.check()
        if is_at(self._file, self._path):
            return
        log.warning("%s was removed or replaced while this run held it; it is locked again.", self._path)
        os.close(self._file)
        self._file = self._open()
        if not self._locked():
            raise _taken(self._path, self._owner())
        self._sign()

    def _open(self) -> int:
        """Open the lock file, readable by its owner only: who may read it could lock it."""
        descriptor = fenced_writes.open_own(self._path, os.O_RDWR | os.O_CREAT, shared=False)
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            with contextlib.suppress(OSError):  # some file systems have one mode for all files
                os.fchmod(descriptor, 0o600)
        return descriptor  # closing any descriptor of the file would release the lock

    def _sign(self) -> None:
        owner: dict[str, object] = {
            "job": self._topology.job_label,
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
                path = self._path
                log.warning("The file system of %s has no locks: two runs at the same time would not be noticed.", path)
                return True
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def _owner(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            owner = run_files.parse(os.pread(self._file, 4096, 0))
            if isinstance(owner, dict):
                return owner
        return {}


def _who(owner: dict[str, object]) -> str:
    job = f"job {owner['job']}" if owner.get("job") else "a run"
    return f"{job} (process {owner.get('process', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')})"


def _taken(lock: Path, owner: dict[str, object]) -> RunDirError:
    return RunDirError(
        f"Writing to the run directory {lock.parent}:",
        f"{lock.name} was removed or replaced, and {_who(owner)} is using the run directory now. This run ends: "
        "two at the same time would damage each other's files.",
        "to run both, give each its own run directory: --run-dir PATH",
    )


def _in_use(lock: Path, owner: dict[str, object], same_job: bool) -> RunDirError:
    job = owner.get("job")
    end_it = f"end it first (scancel {job})" if job else "end it first"
    if same_job:
        found = f"{_who(owner)}, the former run of this job, is still using it after {PATIENCE_S:g} s."
        return RunDirError(
            f"Using the run directory {lock.parent}:",
            found,
            f"if its node is gone for good: rm {shlex.quote(str(lock))}",
        )
    return RunDirError(
        f"Using the run directory {lock.parent}:",
        f"{_who(owner)} is using it.",
        f"give this run its own run directory (--run-dir PATH), or {end_it}",
    )
