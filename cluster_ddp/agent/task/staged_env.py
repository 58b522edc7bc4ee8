"""`--stage-env` on a node: unpack the job's environment to the node's own disk, use the copy, remove it.

A node that can't unpack it (its disk is full, say) uses the environment where it is.

Others may write to that disk, too, so they must not be able to choose what the ranks run:

- The copy's name has a random part, which nobody can know before the copy exists.
- Nobody else may replace a part of the path to it: each belongs to us or root, and others may write only to a folder
  with the sticky bit, such as /tmp.
- The copy and the archive are ours alone, and no links. Each is opened first, and the open file is examined.

Who uses a copy holds a shared lock on it (flock). Copies that killed jobs have left are removed an hour later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cluster_ddp.agent import rank_notes
from cluster_ddp.run import ownership
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.variables import node_name

PREFIX = "cluster_ddp-env-"
"""So begin the names of all copies."""
LEFT_AFTER_S = 3600
"""A copy of this age that nobody uses was left by a job that has been killed."""

_BEGUN = ".begun-{}"
"""In a copy: the task of that rank has begun."""

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Staged(NamedTuple):
    """What a task runs, from the copy if there is one."""

    command: list[str]
    env: dict[str, str]
    copy: Path | None = None
    """The copy; None if the environment is used where it is."""
    lock: int | None = None
    """Descriptor of the lock on the copy. Child processes inherit it, so that the copy stays while they run; those of
    `subprocess` need `pass_fds`."""
    tasks: int = 1
    """Number of tasks of the node: the copy stays until all have begun, and the last has ended."""


def new_name(job_id: str) -> str:
    """Return a name for the copies of one start of a job, up to the node's number, for `names.Env.COPY`."""
    return f"{PREFIX}{job_id}-{os.urandom(8).hex()}"


def unpack(archive: Path, copy_name: str, venv: str, env: Mapping[str, str]) -> bool:
    """Unpack the environment on a node, before its ranks start. The copy appears whole or not at all.

    Copies that killed jobs have left there are removed first.

    Args:
        archive: the environment as a tar file, uncompressed.
        copy_name: from `new_name`.
        venv: the environment, for the warning on stderr if the node can't unpack it.
        env: environment of the process. The copy belongs in SLURM_TMPDIR, by default in /tmp.

    Returns:
        Whether there is a copy.
    """
    try:
        disk = _disk(env)
        _refuse_weak(disk)
        rank_notes.remove_leftovers(disk, prefix=PREFIX, new_s=LEFT_AFTER_S)
        with open(_open_archive(archive), "rb") as tar:
            _extract(tar, disk / f"{copy_name}-{env['SLURM_NODEID']}", env)
    except OSError as error:
        node, why = node_name(env), ": ".join(filter(None, (error.filename, error.strerror))) or str(error)
        said = f"warning: Node {node} could not unpack the environment ({why}). Its ranks import from {venv}."
        print(said, file=sys.stderr, flush=True)
        return False
    return True


def use(venv: str, command: Sequence[str], env: Mapping[str, str], *, tasks: int = 1) -> Staged:
    """Let a task use its node's copy, if there is one: by PATH, VIRTUAL_ENV, and the first word of its command.

    `tasks` is the number of tasks of the node that do.
    """
    as_it_is = Staged(list(command), dict(env))
    if not env.get(Env.COPY):
        return as_it_is
    try:
        copy = _disk(env) / f"{env[Env.COPY]}-{env['SLURM_NODEID']}"
        lock = rank_notes.lock(copy, fcntl.LOCK_SH)
    except OSError:
        return as_it_is
    if not os.access(copy / "bin" / "python", os.X_OK):
        os.close(lock)
        return as_it_is
    os.set_inheritable(lock, True)
    with contextlib.suppress(OSError):  # a full disk: the copy stays until another job removes it
        (copy / _BEGUN.format(env.get("RANK", "0"))).touch()
    more = {"VIRTUAL_ENV": str(copy), "PATH": f"{copy}/bin:{env.get('PATH', os.defpath)}"}
    program = command[0]
    if program.startswith(f"{venv}/"):
        program = f"{copy}/{program[len(venv) + 1 :]}"
    return Staged([program, *command[1:]], {**env, **more}, copy, lock, tasks)


def remove(staged: Staged) -> None:
    """Give up the lock of a task that has ended. The last one on the node removes the copy."""
    if staged.copy is None or staged.lock is None:
        return
    os.close(staged.lock)
    if len([*staged.copy.glob(_BEGUN.format("*"))]) >= staged.tasks:  # else a slower one would not find it
        rank_notes.remove_unused(staged.copy)


def _disk(env: Mapping[str, str]) -> Path:
    """The node's own disk, without links in its path.

    Raises:
        OSError: it is missing.
    """
    name = env.get("SLURM_TMPDIR") or "/tmp"
    try:
        return Path(name).resolve(strict=True)
    except RuntimeError as error:  # a circle of links, until Python 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error


def _refuse_weak(disk: Path) -> None:
    """Refuse a folder if others can replace it, what is in it, or a folder that leads to it."""
    for part in (disk, *disk.parents):
        seen = part.lstat()
        if ownership.others(seen) or stat.S_ISLNK(seen.st_mode):
            raise OSError(f"others may replace what is in {part}; set SLURM_TMPDIR to a folder of yours")


def _open_archive(path: Path) -> int:
    """Open the archive. It must be a regular file that nobody else can write: the ranks run what is in it."""
    if stat.S_ISREG(path.lstat().st_mode):  # opening anything else may wait, or do something
        descriptor = os.open(path, _OPEN | os.O_NONBLOCK)
        seen = os.fstat(descriptor)
        if stat.S_ISREG(seen.st_mode) and seen.st_uid == os.geteuid() and not ownership.others(seen):
            return descriptor
        os.close(descriptor)
    raise OSError(f"{path} is not a file of yours that only you can write")


def _extract(archive: BinaryIO, copy: Path, env: Mapping[str, str]) -> None:
    """Unpack an open archive. tar is seven times as fast as Python's tarfile, for small files."""
    import subprocess  # not needed by tasks

    part = copy.with_name(f"{copy.name}.part")
    part.mkdir(mode=0o700)
    try:
        lock = rank_notes.lock(part, fcntl.LOCK_SH)  # it may take longer than the age of leftovers
        try:
            tar = ["tar", "-xf", "-", "-C", str(part)]
            done = subprocess.run(tar, stdin=archive, stderr=subprocess.PIPE, env=dict(env))
            if done.returncode != 0:
                said = os.fsdecode(done.stderr).strip().split("\n")[0] or f"tar ended with status {done.returncode}"
                raise OSError(f"{said}; is the disk of {copy.parent} full?")
            os.utime(lock)
            part.rename(copy)
        finally:
            os.close(lock)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
