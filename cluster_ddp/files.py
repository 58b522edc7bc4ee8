"""Writing files that are whole or not there at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when the body has ended well.

    Written under a unique temporary name in the same folder, fsynced, then renamed, and the folder fsynced; an error in
    the body leaves nothing. A killed process may leave `.<name>.<hex>.tmp`, which is harmless.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was made or renamed in a folder last, where its file system can (fsync(2)).

    Raises:
        OSError: the folder is gone, or its disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
