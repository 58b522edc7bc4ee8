"""What a rank leaves for the process that started it, its supervisor: files in a folder on their node.

failed-RANK   {"words": "ValueError: x", "kind": "program", "step": 120, "micro_batch": null}
stopped-RANK  {}: it was stopped in time; launchers may hide its exit status
joined-RANK   {}: its process group is up

The supervisor makes the folder, names it in `Env.NOTES`, and reads the notes when the rank has ended. Each is written
once: the first word of a rank counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cluster_ddp.errors import one_line
from cluster_ddp.run import ownership
from cluster_ddp.run.files import read_regular
from cluster_ddp.run.names import Env

_PREFIX = "cluster_ddp-notes-"
_NEW_S = 60.0
_IN_MEMORY = Path("/dev/shm")
_BYTES = 64 * 1024


class FailureNote(NamedTuple):
    """Why a rank failed."""

    words: str
    """In one line."""
    kind: str = ""
    """One of `Kind`; empty if unknown."""
    step: int | None = None
    """Number of steps of the training that were done; None if unknown."""
    micro_batch: int | None = None
    """Number of samples in its batch, if the memory of its GPU was too small, and an update may have more batches."""


def failed(env: Mapping[str, str], rank: int | str, note: FailureNote) -> None:
    """Note why a rank failed. If that can't be written, nothing is said: the error itself is printed.

    Args:
        env: an environment, such as os.environ; without `Env.NOTES` there, nothing is done.
        rank: the rank.
        note: why.
    """
    _write(env, f"failed-{rank}", note._replace(words=one_line(note.words))._asdict())


def stopped(env: Mapping[str, str], rank: int | str) -> None:
    """Note that a rank was stopped in time. See `failed`."""
    _write(env, f"stopped-{rank}", {})


def joined(env: Mapping[str, str], rank: int | str) -> None:
    """Note that a rank has met the others. See `failed`."""
    _write(env, f"joined-{rank}", {})


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder for notes, for its owner only: in memory, else in the temporary folder.

    It is removed after the body. Those of processes that were killed are removed first: who has one locks it. If none
    can be made, nothing can be noted: then it is no folder.
    """
    made, locked = _locked_folder()
    try:
        yield made
    finally:
        if locked is not None:
            shutil.rmtree(made, ignore_errors=True)
            os.close(locked)


def _locked_folder() -> tuple[Path, int | None]:
    for parent in (_IN_MEMORY, Path(os.environ.get("TMPDIR") or "/tmp")):
        with contextlib.suppress(OSError):
            remove_leftovers(parent)
            made = parent / f"{_PREFIX}{os.urandom(4).hex()}"
            made.mkdir(mode=0o700)  # fails if there is one
            return made, lock(made)
    return Path(os.devnull), None


def lock(path: Path, how: int = fcntl.LOCK_EX) -> int:
    """Lock a folder of ours, until its descriptor is closed: a process that is killed closes it, too.

    Raises:
        OSError: it is no folder, or not ours alone; it has been removed; somebody else has locked it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(folder)
        may_be_written = stat.S_IMODE(seen.st_mode) & 0o022  # else no names are looked up: each task locks a folder
        if seen.st_uid != os.geteuid() or (may_be_written and ownership.others(seen)):
            raise PermissionError(errno.EPERM, "others may have written it", str(path))
        fcntl.flock(folder, how | fcntl.LOCK_NB)
        if not os.path.samestat(seen, path.lstat()):
            raise FileNotFoundError(errno.ENOENT, "it has been removed", str(path))
    except BaseException:
        os.close(folder)
        raise
    return folder


def remove_leftovers(parent: Path, *, prefix: str = _PREFIX, new_s: float = _NEW_S) -> None:
    """Remove our folders that nobody has locked, but those of the last seconds: a new one is not locked yet."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > new_s:
                remove_unused(left)


def remove_unused(folder: Path) -> None:
    """Remove a folder of ours, unless somebody has locked it."""
    with contextlib.suppress(OSError):
        locked = lock(folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(locked)


class Notes:
    """Reads what the ranks have left in a folder, which `Env.NOTES` names for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def failure(self, rank: int) -> FailureNote | None:
        """Return why a rank failed; None if it left no such note."""
        try:
            note = json.loads(read_regular(self._folder / f"failed-{rank}", _BYTES))
            words, kind = one_line(str(note["words"])), one_line(str(note["kind"]))
            return FailureNote(words, kind, *(_whole(note.get(name)) for name in ("step", "micro_batch")))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank was stopped in time."""
        return self._has("stopped", rank)

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has met the others."""
        return self._has("joined", rank)

    def _has(self, kind: str, rank: int) -> bool:
        return os.path.lexists(self._folder / f"{kind}-{rank}")


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _write(env: Mapping[str, str], name: str, note: Mapping[str, Any]) -> None:
    if folder := env.get(Env.NOTES):
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(Path(folder) / name, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
