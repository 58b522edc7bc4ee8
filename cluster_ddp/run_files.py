"""Reads files of run directories. Others may have written them: no read waits, or takes more memory than its limit.

Only regular files are read: a named pipe would wait for a writer for ever, and /dev/zero never ends.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_MIB = 1 << 20
LOG_BYTES = 64 * _MIB
"""So much of the end of a log is read."""
_SMALL = 8 * _MIB  # spec.json has the command twice, and Linux allows commands of 2 MiB
LONGEST_LINE = _MIB
"""A longer line is read in pieces."""
_LINES, _LISTED_LINES = 256 * _MIB, 16 * _MIB
_DEEPEST = 50
_LONGEST_INTEGER = 18  # digits: a longer one is a float, which can be compared with others


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, if it is a regular one. Symbolic links are followed.

    Raises:
        OSError: it is something else, or can't be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


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


def tail(path: Path, size: int = 100_000) -> str:
    """Return the last `size` bytes of a file as text; nothing if it can't be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def each_json_line(path: Path, *, last_bytes: int = _LINES) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; none if it can't be read. Damaged or half written lines are left out.

    Args:
        path: of the file.
        last_bytes: read only so many bytes at its end.
    """
    try:
        file = open_regular(path)
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
