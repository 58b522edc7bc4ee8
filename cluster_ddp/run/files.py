"""Writes and reads files and folders of run directories.

What is written is readable by its owner only unless shared, and whole or not at all. What is read others may have
written: no read waits, or takes more memory than its limit. Only regular files are read: a named pipe would wait for a
writer for ever, and /dev/zero never ends.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cluster_ddp.run.names import Env

T = TypeVar("T")

_MIB = 1 << 20
LOG_BYTES = 64 * _MIB
"""So much of the end of a log is read."""
_SMALL = 8 * _MIB  # spec.json has the command twice, and Linux allows commands of 2 MiB
LONGEST_LINE = _MIB
"""A longer line is read in pieces."""
_LINES, _LISTED_LINES = 256 * _MIB, 16 * _MIB
_DEEPEST = 50
_LONGEST_INTEGER = 18  # digits: a longer one is a float, which can be compared with others


def make_dir(path: Path, *, shared: bool | None = None) -> None:
    """Make a folder of mode 0700, or 0750 if shared with the group. Missing parents get the umask's mode.

    `shared` is by default what `names.Env.SHARE` says. If the folder exists or can't be made, it is an OSError.
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

    A new file has mode 0600. If shared (default: `names.Env.SHARE` in the environment), with O_CREAT in `flags`, the
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
        if (written := file.write(line)) == len(line):
            return True
        file.truncate(file.tell() - written)  # half a line would spoil the next one
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


def open_regular(path: Path, *, follows: bool = True) -> BinaryIO:
    """Open a file for reading, if it is a regular one. Symbolic links are followed, unless not `follows`.

    Raises:
        OSError: it is something else, or can't be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a small file that is no link.

    Raises:
        OSError: it has more than `limit` bytes, can't be read, or is no regular file.
    """
    with open_regular(path, follows=False) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return content


def read_text(path: Path) -> str:
    """Return the content of a small file as text.

    Raises:
        OSError: it can't be read, is not a regular file, or has more than 8 MiB.
    """
    with open_regular(path) as file:
        content = file.read(_SMALL + 1)
    if len(content) > _SMALL:
        raise OSError(errno.EFBIG, f"it is larger than {_SMALL // _MIB} MiB", str(path))
    return content.decode(errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small file of JSON.

    Raises:
        OSError: as for `read_text`.
        ValueError: it is no JSON, not an object, or nested too deeply.
    """
    value = parse(read_text(path))
    if not isinstance(value, dict):
        raise ValueError("it is not an object of JSON")
    if not _is_flat(value, _DEEPEST):
        raise ValueError("it is nested too deeply")
    return value


def parse(text: str | bytes) -> Any:
    """Return the value of a text of JSON.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)


def _is_flat(value: object, deepest: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(_is_flat(one, deepest - 1) for one in inner)


def tail(path: Path, size: int = 100_000, *, since: int = 0) -> str:
    """Return the last `size` bytes of a file from a place in it on, as text; nothing if it can't be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def each_json_line(path: Path, *, last_bytes: int = _LINES, follows: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; none if it can't be read. Damaged or half written lines are left out.

    Args:
        path: of the file.
        last_bytes: read only so many bytes at its end.
        follows: whether the file may be a symbolic link.
    """
    try:
        file = open_regular(path, follows=follows)
    except OSError:
        return
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
        left = last_bytes
        while line := file.readline(min(left, LONGEST_LINE)):
            left -= len(line)
            try:
                value = parse(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def json_lines(path: Path, *, last_bytes: int = _LISTED_LINES) -> list[dict[str, Any]]:
    """Return what `each_json_line` yields."""
    return list(each_json_line(path, last_bytes=last_bytes))


def number(value: object, most: float = 1e12) -> float | None:
    """Return a value if it is a number, finite and not absurdly large; else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < most else None  # type: ignore[arg-type, return-value]


def is_count(value: object) -> bool:
    """Return whether a value is a number of nodes, GPUs or CPUs, in a file that makes sense."""
    return type(value) is int and 0 < value < 1_000_000


def problem(path: Path) -> str:
    """Return why a file can't be read, in words; "" if it can, or is missing."""
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path.name} can't be read: {why(error)}."
    return ""


def why(error: Exception) -> str:
    """Return why a file can't be read, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
