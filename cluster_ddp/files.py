"""Writes files and folders of run directories: readable by their owner only unless shared, and whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cluster_ddp.protocol import Env

T = TypeVar("T")


def make_dir(path: Path, *, shared: bool | None = None) -> None:
    """Make a folder of mode 0700, or 0750 if shared with the group. Missing parents get the umask's mode.

    `shared` is by default what `protocol.Env.SHARE` says. If the folder exists or can't be made, it is an OSError.
    """
    path.mkdir(mode=0o700, parents=True)
    if _is_shared(shared):
        path.chmod(path.stat().st_mode & 0o7777 | 0o050)  # keeps the set-group-ID bit it may have inherited


def ensure_dir(path: Path) -> None:
    """Make a folder as `make_dir`, unless it exists; another process may make it at the same time."""
    if not path.is_dir():
        try:
            make_dir(path)
        except FileExistsError:
            if not path.is_dir():
                raise


def open_own(path: Path, flags: int, *, shared: bool | None = None) -> int:
    """Open a file, but not through a symbolic link. Child processes do not inherit the descriptor.

    A new file has mode 0600. If shared (default: `protocol.Env.SHARE` in the environment), with O_CREAT in `flags`, the
    group may also read the file, new or not. If it is a link, or can't be opened, it is an OSError.
    """
    try:
        descriptor = with_reserve(lambda: os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "It is a symbolic link", str(path)) from error
        raise
    mode = os.fstat(descriptor).st_mode & 0o7777
    if flags & os.O_CREAT and _is_shared(shared) and not mode & 0o040:
        os.fchmod(descriptor, mode | 0o040)
    return descriptor


def is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` still names this open file: others may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _is_shared(shared: bool | None) -> bool:
    return os.environ.get(Env.SHARE) == "1" if shared is None else shared


def to_json(value: object, *, default: Callable[[Any], Any] | None = None, indent: int | None = None) -> str:
    """Return a value as JSON (see `json.dumps`). A non-finite number is null: JSON has none, some readers refuse it."""
    try:
        return json.dumps(value, default=default, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value, default), indent=indent, allow_nan=False)


def _finite(value: object, default: Callable[[Any], Any] | None) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key) if isinstance(key, float) else key: _finite(one, default) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one, default) for one in value]
    if value is None or isinstance(value, (str, int)) or default is None:
        return value
    return _finite(default(value), default)


@contextmanager
def atomic_write(path: Path, *, shared: bool | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears under its name only if the body succeeds, with the mode of `open_own`.

    The file has a unique temporary name in the same folder. It is fsynced and renamed, then the folder is fsynced.
    After an error in the body no file is left. A killed process may leave `.<name>.<hex>.tmp`; see `remove_leftovers`.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shared=shared), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_record(path: Path, record: Mapping[str, Any], *, shared: bool) -> bool:
    """Append a line of JSON to a file. Returns whether it is there: the disk may be full. Nothing is raised."""
    flags, line = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, json.dumps(record).encode() + b"\n"
    with suppress(OSError), open(open_own(path, flags, shared=shared), "ab", buffering=0) as file:
        return file.write(line) == len(line)
    return False


def refresh(folder: Path) -> None:
    """Ask the server of NFS whether a folder has changed, by opening it (nfs(5), close-to-open). Raises OSError."""
    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def remove_leftovers(folder: Path) -> None:
    """Remove the half-written files that killed processes left in `atomic_write`. No process may write there now."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if its file system supports that (fsync(2)).

    Raises:
        OSError: the folder is gone, or its disk fails.
    """
    descriptor = with_reserve(lambda: os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


_RESERVED = 4
_reserve: list[int] = []


def reserve_descriptors() -> None:
    """Keep a few descriptors open, so that files can be saved when connections have taken all others."""
    with suppress(OSError):
        while len(_reserve) < _RESERVED:
            _reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def with_reserve(function: Callable[[], T]) -> T:
    """Call a function that needs a descriptor. If none is left, close a reserved one and call it again.

    Raises:
        OSError: the one that the function raises.
    """
    try:
        return function()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _reserve:
            raise
    os.close(_reserve.pop())
    return function()


def spare_descriptor() -> None:
    """Let one descriptor be free, for a file that is opened elsewhere, if a reserved one is left."""
    with suppress(OSError):
        with_reserve(lambda: os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)))
